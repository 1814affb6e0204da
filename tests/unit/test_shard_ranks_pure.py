"""Cores, verdicts, sums, channels and acknowledged records of a shard's ranks."""

from __future__ import annotations

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orchestrator.embedded.shard.ranks.channel import Channel, ChannelClosed
from orchestrator.embedded.shard.ranks.cores import cores_of, threads_of
from orchestrator.embedded.shard.ranks.group import Group, GroupBroken
from orchestrator.embedded.shard.ranks.messages import Clear, Decode, Done, Failed, Reply
from orchestrator.embedded.shard.ranks.records import Exports, LeadBridge, Reports
from orchestrator.embedded.shard.ranks.verdict import disagreement
from orchestrator.embedded.shard.seam import CachedBatch
from tgi_patches.bridge import FirstToken
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason, Role, ShardSpec, new_handle
from tgi_patches.sidecar import Sidecar

# --- cores ---


def test_ranks_share_the_cores_equally_and_without_overlap() -> None:
    assert [cores_of((2, 3, 5, 7, 8), 2, rank) for rank in (0, 1)] == [(2, 3), (5, 7)]
    assert cores_of((2, 3), 1, 0) == (2, 3)
    assert [threads_of(5, 2), threads_of(2, 3)] == [2, 1]


def test_ranks_that_are_more_than_the_cores_use_them_all() -> None:
    assert [cores_of((4, 6), 3, rank) for rank in range(3)] == [(4, 6)] * 3


# --- verdicts ---

STEP = Done(((1, 42), (2, 7)), CachedBatch(3, (1, 2), 2), (("a" * 32, None),))
SAME = Failed("ValueError", "slots")


@pytest.mark.parametrize(
    "replies", [(STEP, STEP), (STEP, Done(STEP.chosen, STEP.running, (("a" * 32, MissReason.LAYOUT),)))]
)
def test_ranks_that_took_the_same_step_agree_whatever_became_of_their_records(
    replies: tuple[Reply, ...],
) -> None:
    assert disagreement(replies) is None


def test_ranks_that_failed_alike_agree() -> None:
    assert disagreement((SAME, SAME, SAME)) is None


@pytest.mark.parametrize(
    ("replies", "sentence"),
    [
        ((STEP, Done(((1, 42), (2, 8)), STEP.running, STEP.reported)), "Rank 1 of this shard took another"),
        ((STEP, STEP, Done(STEP.chosen, None, STEP.reported)), "Rank 2 of this shard took another"),
        ((STEP, Done(STEP.chosen, STEP.running)), "Rank 1 of this shard took another"),
        ((None, STEP), "Rank 0 of this shard did not finish a step"),
        ((STEP, None), "Rank 1 of this shard did not finish a step"),
        ((SAME, Failed("ValueError", "other slots")), "Rank 0 of this shard failed where others did not"),
        ((STEP, SAME), "Rank 1 of this shard failed where others did not: ValueError."),
        ((None, SAME), "Rank 1 of this shard failed where others did not: ValueError."),
        ((Failed("GroupBroken", "Rank 0 lost.", ours=True), SAME), "Rank 1 .* ValueError"),
        ((STEP, Failed("ConfigError", "No room.", ours=True)), "did not: No room."),
    ],
)
def test_a_rank_that_differs_is_named(replies: tuple[Reply | None, ...], sentence: str) -> None:
    found = disagreement(replies)
    assert found is not None
    assert re.search(sentence, found)
    assert "slots" not in found


# --- sums ---


def groups(tmp_path: Path, ranks: int, call_deadline_s: float = 10) -> list[Group]:
    def met(rank: int) -> Group:
        meeting = str(tmp_path / "meeting")
        return Group(meeting, rank, ranks, join_deadline_s=10, call_deadline_s=call_deadline_s)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(met, range(ranks)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_that_of_all_ranks_and_the_same_on_each(tmp_path: Path, dtype: torch.dtype) -> None:
    def summed(group: Group) -> torch.Tensor:
        with torch.inference_mode():
            part = torch.linspace(0.1, 3.7, 1001, dtype=dtype)[None] * (group.rank + 1)
            group.add(part)
        return part

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(summed, groups(tmp_path, 3))
    torch.testing.assert_close(first[0], (torch.linspace(0.1, 3.7, 1001) * 6).to(dtype))
    assert all(torch.equal(first, other) for other in others)


def test_ranks_agree_only_on_a_number_that_all_give(tmp_path: Path) -> None:
    made = groups(tmp_path, 2)
    with ThreadPoolExecutor(2) as pool:
        for votes, verdict in (((5, 5), 5), ((5, 0), 0), ((0, 5), 0), ((0, 0), 0), ((5, 7), 0), ((7, 5), 0)):
            got = list(pool.map(lambda group, vote: group.agree(vote), made, votes))
            assert got == [verdict] * 2


def test_a_rank_that_does_not_join_a_call_breaks_the_group_in_time(tmp_path: Path) -> None:
    first, _second = groups(tmp_path, 2, call_deadline_s=0.2)
    with pytest.raises(GroupBroken, match=r"ended, or did not take part for 0\.2 s\.$"):
        first.agree(1)


@pytest.mark.timeout(20)
def test_a_rank_that_left_breaks_the_group_at_once(tmp_path: Path) -> None:
    first, second = groups(tmp_path, 2, call_deadline_s=60)
    second.close()

    with pytest.raises(GroupBroken):
        first.add(torch.ones(3))


def test_a_rank_that_nobody_meets_gives_up(tmp_path: Path) -> None:
    with pytest.raises(GroupBroken, match=r"Rank 0 did not meet the others within 0\.2 s\.$"):
        Group(str(tmp_path / "meeting"), 0, 2, join_deadline_s=0.2)


# --- channel ---


async def test_messages_arrive_in_order_and_the_end_is_told() -> None:
    one, other = [await Channel.over(end) for end in socket.socketpair()]
    sent = (Clear(None), Decode((CachedBatch(1, tuple(range(50_000))),)), STEP)
    for message in sent:
        one.send(message)
    assert [await other.receive() for _ in sent] == list(sent)
    await one.close()
    with pytest.raises(ChannelClosed):
        await other.receive()
    other.send(Clear(None))
    await other.close()


# --- records ---


def lead(tmp_path: Path, now: list[float]) -> tuple[LeadBridge, Exports, Sidecar]:
    spec = ShardSpec(
        "d", "p", Role.PREFILL, "/m", "m", arena_dir=str(tmp_path), arena_bytes=4 << 20, tensor_parallel=2
    )
    fingerprint = Fingerprint("m", "", "", "float32", "float32", 1, 2, 4, tensor_parallel=2)
    bridge = LeadBridge(spec, 1, fingerprint, now=lambda: now[0])
    sidecar = Sidecar(lambda: pytest.fail("no status"), bridge, keep_s=60.0)
    return bridge, Exports(bridge, sidecar), sidecar


async def test_a_record_is_found_once_all_ranks_have_reported_it(tmp_path: Path) -> None:
    bridge, exports, sidecar = lead(tmp_path, [0.0])
    good, bad = new_handle(), new_handle()
    for handle in (good, bad):
        bridge.export(handle, (1, 2), FirstToken(5, -0.5), False, [[memoryview(bytearray(32))]])
        assert (await sidecar.wait(handle, 0.0)).reason == MissReason.MISSING
    own, other = Reports(), Reports()
    for reports in (own, other):
        reports.published(good)
    own.published(bad)
    other.failed(bad, MissReason.LAYOUT)
    exports.settle([own.taken(), other.taken()])
    found = await sidecar.wait(good, 0.0)
    assert (found.found, found.kv_bytes) == (True, 2 * 32)
    refused = await sidecar.wait(bad, 0.0)
    assert (refused.found, refused.reason) == (False, MissReason.LAYOUT)
    assert exports.counts == {"ok": 1, "layout": 1}
    assert own.taken() == ()
    bridge.close()


def test_acknowledged_handles_are_forgotten_with_their_records(tmp_path: Path) -> None:
    now = [0.0]
    bridge, _, _ = lead(tmp_path, now)
    old, new = new_handle(), new_handle()
    bridge.acknowledge(old)
    now[0] = 61.0
    bridge.acknowledge(new)
    assert list(bridge._complete) == [new]
    with pytest.raises(BridgeMiss, match="not every rank"):
        bridge.own_lookup(old)
    bridge.close()


async def test_settling_nothing_tells_nothing(tmp_path: Path) -> None:
    bridge, exports, _ = lead(tmp_path, [0.0])
    exports.settle([(), ()])
    await asyncio.sleep(0)
    assert exports.counts == {}
    bridge.close()
