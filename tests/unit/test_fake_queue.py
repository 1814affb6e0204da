from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Completion, Outcome, Relayed, ShardView, Ticket
from orchestrator.errors import Overloaded, Unavailable
from orchestrator.queues import FakeQueue, RequestQueue
from tgi_patches.contract import Fingerprint, Limits, Role

PRINT = Fingerprint("m", "r", "t", "float32", "float32", layers=2, kv_heads=1, head_dim=8)


def view(shard: str, role: Role, slots: int = 1) -> ShardView:
    limits = Limits(4000, 4096)
    return ShardView(
        shard, role, 1, f"http://{shard}", ShardState.READY, PRINT, limits, 1600, slots, 40_000, 10_000, 10
    )


PAIR = (view("p0", Role.PREFILL), view("d0", Role.DECODE))


def ticket(handle: str, deadline_s: float = 60.0, prompt: int = 100, priority: int = 0) -> Ticket:
    now_s = time.time()
    times = {"created_s": now_s, "deadline_s": now_s + deadline_s}
    return Ticket(handle, "fake.1", prompt, 60, priority=priority, **times)


def reserved(queue: FakeQueue) -> int:
    return sum(
        one.reserved_kv_tokens + one.reserved_slots + one.outstanding_bytes + one.outstanding_records
        for one in queue.shards()
    )


async def test_a_request_holds_its_reservation_until_it_completes_once() -> None:
    queue: RequestQueue = FakeQueue(PAIR)
    grant = await queue.submit(ticket("a"))
    assert grant.prefill is not None
    assert (grant.prefill.shard, grant.decode.shard) == ("p0", "d0")
    prefill, decode = queue.shards()
    assert (prefill.outstanding_bytes, prefill.outstanding_records) == (1000, 1)
    assert (decode.reserved_kv_tokens, decode.reserved_slots) == (160, 1)
    for _ in range(2):
        await queue.complete(Completion("a", Outcome.DONE))
    assert isinstance(queue, FakeQueue)
    assert reserved(queue) == 0
    assert [one.handle for one in queue.completions] == ["a"]


async def test_an_imported_record_is_given_back_once_and_the_decode_shard_stays_held() -> None:
    queue = FakeQueue(PAIR)
    queue.relayed(Relayed("a"))  # nothing was granted yet
    await queue.submit(ticket("a"))
    for _ in range(2):
        queue.relayed(Relayed("a", first_token_s=1.5))
        prefill, decode = queue.shards()
        assert (prefill.outstanding_bytes, prefill.outstanding_records) == (0, 0)
        assert (decode.reserved_kv_tokens, decode.reserved_slots) == (160, 1)
    assert queue.imported == [Relayed("a", first_token_s=1.5)]
    await queue.complete(Completion("a", Outcome.DONE))
    queue.relayed(Relayed("a"))
    assert reserved(queue) == 0
    assert len(queue.imported) == 1


async def test_requests_are_served_in_order_as_room_comes_back() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    waiting = [asyncio.create_task(queue.submit(ticket(name))) for name in "bc"]
    await asyncio.sleep(0)
    assert queue.waiting == 2
    await queue.complete(Completion("a", Outcome.DONE))
    assert (await waiting[0]).handle == "b"
    assert not waiting[1].done()
    await queue.complete(Completion("b", Outcome.DONE))
    assert (await waiting[1]).handle == "c"
    assert [one.handle for one in queue.granted] == ["a", "b", "c"]


async def test_a_higher_class_goes_first_and_a_place_within_a_class_is_kept() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    arrivals = [("low", -1), ("b", 0), ("high", 1), ("c", 0), ("higher", 1)]
    waiting = [asyncio.create_task(queue.submit(ticket(name, priority=one))) for name, one in arrivals]
    await asyncio.sleep(0)
    for name in ("a", "high", "higher", "b", "c"):
        await queue.complete(Completion(name, Outcome.DONE))
    await asyncio.gather(*waiting)
    assert [one.handle for one in queue.granted] == ["a", "high", "higher", "b", "c", "low"]


async def test_a_cancelled_ticket_lets_the_next_one_pass_and_its_waiter_know() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    waiting = [asyncio.create_task(queue.submit(ticket(name))) for name in "bc"]
    await asyncio.sleep(0)
    await queue.cancel("b")
    with pytest.raises(Unavailable):
        await waiting[0]
    await queue.complete(Completion("a", Outcome.DONE))
    assert (await waiting[1]).handle == "c"


async def test_a_waiter_that_is_cancelled_leaves_nothing_behind() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    waiter = asyncio.create_task(queue.submit(ticket("b")))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await queue.complete(Completion("a", Outcome.DONE))
    assert (queue.waiting, reserved(queue)) == (0, 0)


async def test_a_grant_that_its_waiter_never_saw_is_given_back() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    waiter = asyncio.create_task(queue.submit(ticket("b")))
    await asyncio.sleep(0)
    await queue.complete(Completion("a", Outcome.DONE))  # grants b
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert reserved(queue) == 0


async def test_refusals_carry_the_status_that_a_client_shall_see() -> None:
    with pytest.raises(Unavailable):
        await FakeQueue().submit(ticket("a"))
    queue = FakeQueue(PAIR, queue_size=1)
    with pytest.raises(Unavailable, match="1600"):
        await queue.submit(ticket("big", prompt=1600))
    await queue.submit(ticket("a"))
    with pytest.raises(Overloaded, match="deadline"):
        await queue.submit(ticket("late", deadline_s=0.0))
    waiter = asyncio.create_task(queue.submit(ticket("b")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="full"):
        await queue.submit(ticket("c"))
    await queue.aclose()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiter


async def test_no_ready_shard_by_the_deadline_is_unavailable_rather_than_overloaded() -> None:
    queue = FakeQueue([replace(one, state=ShardState.DEAD) for one in PAIR])
    with pytest.raises(Unavailable, match="ready"):
        await queue.submit(ticket("a", deadline_s=0.0))


async def test_a_new_table_keeps_what_is_held_and_wakes_who_waits() -> None:
    queue = FakeQueue(PAIR)
    await queue.submit(ticket("a"))
    waiter = asyncio.create_task(queue.submit(ticket("b")))
    await asyncio.sleep(0)
    queue.set_shards([*PAIR, view("d1", Role.DECODE)])
    assert (await waiter).decode.shard == "d1"
    assert {one.shard: one.reserved_slots for one in queue.shards()} == {"p0": 0, "d0": 1, "d1": 1}
    queue.set_state("d0", ShardState.SUSPECT)
    assert {one.shard: one.state for one in queue.shards()}["d0"] == "suspect"
