"""The device path through the life of a server: Warmup, exports between steps, a second Warmup, the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.unit.device.bed import SLOTS, Bed, FakeRuntime, Log, Pools, pools, rows
from tgi_patches.contract import BridgeMiss, MissReason
from tgi_patches.device.path import VARIABLE, DevicePath
from tgi_patches.device.registration import Registrar

RING_BYTES = 1 << 20
ON = {VARIABLE: "1"}


class Server:
    def __init__(self, root: Path) -> None:
        self.bed = Bed(root)
        self.runtime = FakeRuntime()
        self.registrar = Registrar(self.runtime, Log())
        self.path = DevicePath(self.bed.streams, self.registrar)

    def arm(self) -> None:
        assert self.bed.writer._writer is not None
        self.path.armed(self.bed.writer._writer.mapping.data, RING_BYTES)

    def export(self, cache: Pools, number: int = 1) -> None:
        pool = self.path.pool(cache, lambda: cache)
        self.path.export(pool, SLOTS, self.bed.reserve(number, len(SLOTS)), self.bed.done)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "arenas")


async def test_a_record_is_published_by_the_servers_own_loop(server: Server) -> None:
    server.arm()
    cache = pools()
    told: asyncio.Queue[BridgeMiss | None] = asyncio.Queue()
    pool = server.path.pool(cache, lambda: cache)
    server.path.export(pool, SLOTS, server.bed.reserve(1, len(SLOTS)), told.put_nowait)
    assert told.empty()
    server.bed.streams.step()
    assert await asyncio.wait_for(told.get(), 5) is None
    assert server.bed.read() == rows(cache, SLOTS)
    assert server.path.counts == {"registered": 1, "finished": 1}
    assert "pinned" not in server.bed.streams.calls  # straight into the registered ring


async def test_a_step_publishes_too(server: Server) -> None:
    server.arm()
    server.path.poll()
    server.export(pools())
    server.bed.streams.step()
    server.path.poll()
    assert server.bed.outcomes == ["published"]


def test_before_warmup_returned_nothing_is_asked_of_the_device(server: Server) -> None:
    with pytest.raises(BridgeMiss) as caught:
        server.export(pools())
    assert caught.value.reason is MissReason.UNSUPPORTED
    assert (server.runtime.calls, server.bed.streams.calls) == ([], [])


async def test_a_later_warmup_finds_nothing_under_way_and_a_new_cache_is_a_new_pool(server: Server) -> None:
    server.arm()
    server.export(pools())
    server.path.forget()
    assert (server.bed.outcomes, server.bed.streams.queued) == (["published"], [])
    with pytest.raises(BridgeMiss):
        server.export(pools(), 2)
    assert not server.registrar.add(memoryview(bytearray(4096)))
    server.arm()
    other = pools(seed=70)
    server.export(other, 3)
    server.path.close()
    assert server.bed.read(3) == rows(other, SLOTS)
    assert [call[0] for call in server.runtime.calls] == ["register", "unregister"]


async def test_a_cache_that_was_made_anew_is_never_mixed_up_with_the_old_one(server: Server) -> None:
    server.arm()
    first, second = pools(), pools(seed=70)
    server.export(first)
    kept = server.path.pool(first, lambda: first)
    assert server.path.pool(first, lambda: first) is kept
    told: asyncio.Queue[BridgeMiss | None] = asyncio.Queue()
    pool = server.path.pool(second, lambda: second)
    assert server.bed.outcomes == ["published"]  # of the old cache, before the new one is used
    server.path.export(pool, SLOTS, server.bed.reserve(2, len(SLOTS)), told.put_nowait)
    server.bed.streams.step()
    assert await asyncio.wait_for(told.get(), 5) is None
    assert server.bed.read(2) == rows(second, SLOTS)


async def test_copies_under_way_fill_a_quarter_of_the_ring_at_most(server: Server) -> None:
    """Each record here is 192 KiB, the ring 1 MiB."""
    server.arm()
    cache = [(torch.zeros(1024, 1, 2, 24, dtype=torch.float16),) * 2]
    for number in (1, 2):
        pool = server.path.pool(cache, lambda: cache)
        slots = range(1024)
        server.path.export(pool, slots, server.bed.reserve(number, 1024), server.bed.done)
    assert server.bed.outcomes == ["published"]
    server.path.close()
    assert server.bed.outcomes == ["published"] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_have_no_device_path(device: str) -> None:
    assert DevicePath.of(torch.device(device), ON, Log()) is None


def test_making_one_asks_nothing_of_cuda() -> None:
    """There is no CUDA here: a call would raise."""
    assert DevicePath.of(torch.device("cuda", 0), ON, Log()) is not None


@pytest.mark.parametrize("env", [{}, {VARIABLE: "0"}, {VARIABLE: ""}])
def test_it_is_off_unless_asked_for(env: dict[str, str]) -> None:
    assert DevicePath.of(torch.device("cuda", 0), env, Log()) is None
