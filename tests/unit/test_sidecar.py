"""The sidecar's answers: at once for what has happened, woken for what happens, bounded for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import NoReturn

import pytest

from tgi_patches.bridge import FirstToken, Record
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    BridgeMiss,
    Fingerprint,
    Limits,
    MissReason,
    Role,
    StatusReply,
    WaitReply,
)
from tgi_patches.sidecar import FAILURES_KEPT, WAIT_LIMIT_S, Sidecar

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=1, kv_heads=1, head_dim=4)
HANDLE = "0123456789abcdef" * 2
LONG_S = 30.0
KEEP_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refuse() -> NoReturn:
    raise AssertionError("nobody asked for the status")


class Shard:
    """A sidecar with the bridge it answers for."""

    def __init__(self, describe: Callable[[], StatusReply] = refuse) -> None:
        self.clock = Clock()
        self.bridge = MemoryBridge(MemoryHost(), "p", 1, FINGERPRINT, 65536, 60.0)
        self.sidecar = Sidecar(describe, self.bridge, KEEP_S, self.clock)

    def export(self, handle: str = HANDLE, *, ended: bool = False) -> None:
        planes = [[memoryview(bytes(48))], [memoryview(bytes(48))]]
        self.bridge.export(handle, [1, 2, 3], FirstToken(42, -0.5), ended, planes)

    async def waiting(self, handle: str = HANDLE, timeout_s: float = LONG_S) -> asyncio.Task[WaitReply]:
        """A task that waits already."""
        task = asyncio.ensure_future(self.sidecar.wait(handle, timeout_s))
        await asyncio.sleep(0)
        assert not task.done()
        return task


FOUND = WaitReply(
    PROTOCOL_VERSION, HANDLE, found=True, first_token_id=42, ended=False, kv_bytes=96, prompt_tokens=3
)


async def within(answer: Awaitable[WaitReply]) -> WaitReply:
    return await asyncio.wait_for(answer, 10.0)


async def test_what_was_published_before_is_answered_at_once() -> None:
    shard = Shard()
    shard.export()
    shard.sidecar.published(HANDLE)
    assert await within(shard.sidecar.wait(HANDLE, 0.0)) == FOUND


async def test_a_request_that_ended_at_its_first_token_says_so() -> None:
    shard = Shard()
    shard.export(ended=True)
    reply = await within(shard.sidecar.wait(HANDLE, 0.0))
    assert (reply.found, reply.ended, reply.first_token_id) == (True, True, 42)


async def test_all_who_wait_are_woken_from_the_engines_thread() -> None:
    asyncio.get_running_loop().set_debug(True)  # refuses calls from a thread that is not its own
    shard = Shard()
    tasks = [await shard.waiting() for _ in range(3)]
    other = await shard.waiting("f" * 32)

    def engine() -> None:
        shard.export()
        shard.sidecar.published(HANDLE)

    thread = threading.Thread(target=engine)
    thread.start()
    assert [await within(task) for task in tasks] == [FOUND] * 3
    thread.join()
    assert not other.done()
    other.cancel()


class PublishesMeanwhile(MemoryBridge):
    """Finds nothing the first time, and the record is published before that answer is out."""

    shard: Shard

    def own_lookup(self, handle: str) -> Record:
        try:
            return super().own_lookup(handle)
        except BridgeMiss:
            self.shard.export()
            self.shard.sidecar.published(handle)
            raise


async def test_what_is_published_while_a_waiter_looks_is_not_lost() -> None:
    shard = Shard()
    racing = PublishesMeanwhile(MemoryHost(), "q", 1, FINGERPRINT, 65536, 60.0)
    shard.bridge, racing.shard = racing, shard
    shard.sidecar = Sidecar(refuse, racing, KEEP_S)
    assert await within(shard.sidecar.wait(HANDLE, LONG_S)) == FOUND


async def test_publishing_alone_does_not_answer_for_a_record_that_is_not_there() -> None:
    """Overwritten between its publication and the look: a miss, not an invention."""
    shard = Shard()
    task = await shard.waiting()
    shard.sidecar.published(HANDLE)
    reply = await within(task)
    assert (reply.found, reply.reason) == (False, MissReason.MISSING)


async def test_a_failed_export_is_answered_at_once_with_its_reason() -> None:
    shard = Shard()
    task = await shard.waiting()
    threading.Thread(target=shard.sidecar.failed, args=(HANDLE, MissReason.LAYOUT)).start()
    early = await within(task)
    late = await within(shard.sidecar.wait(HANDLE, LONG_S))
    assert early == late == WaitReply(PROTOCOL_VERSION, HANDLE, found=False, reason=MissReason.LAYOUT)


async def test_a_record_that_came_after_all_counts_more_than_its_failure() -> None:
    shard = Shard()
    shard.sidecar.failed(HANDLE, MissReason.ERROR)
    shard.export()
    shard.sidecar.published(HANDLE)
    assert await within(shard.sidecar.wait(HANDLE, 0.0)) == FOUND


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 0.01])
async def test_a_wait_ends_with_its_deadline(timeout_s: float) -> None:
    reply = await within(Shard().sidecar.wait(HANDLE, timeout_s))
    assert reply == WaitReply(PROTOCOL_VERSION, HANDLE, found=False, reason=MissReason.MISSING)


async def test_no_wait_is_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []
    real = asyncio.timeout

    def timeout(delay_s: float | None) -> asyncio.Timeout:
        asked.append(delay_s)
        return real(0.0)

    monkeypatch.setattr(asyncio, "timeout", timeout)
    for timeout_s in (1e9, float("inf"), float("nan")):
        await Shard().sidecar.wait(HANDLE, timeout_s)
    assert asked == [WAIT_LIMIT_S, WAIT_LIMIT_S, 0.0]


async def test_an_overwritten_record_is_answered_at_once() -> None:
    shard = Shard()
    shard.export()
    shard.export()
    for number in range(1000):
        shard.export(f"{number:032x}")
    reply = await within(shard.sidecar.wait(HANDLE, LONG_S))
    assert (reply.found, reply.reason) == (False, MissReason.OVERWRITTEN)


async def test_what_is_no_handle_is_missing() -> None:
    reply = await within(Shard().sidecar.wait("../../etc", 0.0))
    assert (reply.found, reply.reason) == (False, MissReason.MISSING)


async def test_nothing_is_kept_of_those_who_left() -> None:
    shard = Shard()
    task = await shard.waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await shard.sidecar.wait(HANDLE, 0.0)
    shard.export()
    shard.sidecar.published(HANDLE)
    await shard.sidecar.wait(HANDLE, 0.0)
    assert shard.sidecar.waiting == 0


async def test_one_who_leaves_does_not_take_the_others_along() -> None:
    shard = Shard()
    leaver, stayer = await shard.waiting(), await shard.waiting()
    leaver.cancel()
    await asyncio.wait([leaver])
    shard.export()
    shard.sidecar.published(HANDLE)
    assert await within(stayer) == FOUND


async def test_failures_are_forgotten_when_their_time_is_over() -> None:
    shard = Shard()
    shard.sidecar.failed(HANDLE, MissReason.ERROR)
    shard.clock.now_s += KEEP_S - 1
    assert (await shard.sidecar.wait(HANDLE, 0.0)).reason == MissReason.ERROR
    shard.clock.now_s += 1
    assert (await shard.sidecar.wait(HANDLE, 0.0)).reason == MissReason.MISSING
    assert shard.sidecar.remembered == 0


async def test_a_flood_of_failures_keeps_the_newest() -> None:
    shard = Shard()
    handles = [f"{number:032x}" for number in range(FAILURES_KEPT + 10)]
    for handle in handles:
        shard.sidecar.failed(handle, MissReason.LAYOUT)
    assert shard.sidecar.remembered == FAILURES_KEPT
    assert (await shard.sidecar.wait(handles[9], 0.0)).reason == MissReason.MISSING
    assert (await shard.sidecar.wait(handles[10], 0.0)).reason == MissReason.LAYOUT


def test_an_engine_that_outlives_the_event_loop_is_not_disturbed() -> None:
    shard = Shard()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task that never ends is what this is about
    task = loop.create_task(shard.sidecar.wait(HANDLE, LONG_S))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    shard.sidecar.published(HANDLE)
    shard.sidecar.failed(HANDLE, MissReason.ERROR)
    assert not task.done()


def test_status_is_what_the_shard_describes() -> None:
    status = StatusReply(
        PROTOCOL_VERSION, "d", "p", Role.PREFILL, 1, FINGERPRINT, Limits(10, 20), 100, 4, 65536, 16384, 32
    )
    assert Shard(lambda: status).sidecar.status() is status
