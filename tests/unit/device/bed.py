"""A prefill shard with a device of StepStreams, its arena and clock, and a stand-in for CUDA's runtime."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.bridge.one_file import FINGERPRINT, MEBIBYTE, handle
from tgi_patches.bridge import FirstToken, Record, Reservation
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss
from tgi_patches.device.pool import DevicePool, Limits
from tgi_patches.device.streams import StepStreams

FIRST = FirstToken(5, -0.5)
ROOMY = Limits()
SLOTS = [6, 7, 8, 9, 20, 3]
Pools = list[tuple[Tensor, Tensor]]


def noise(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = bytearray(random.Random(seed).randbytes(size))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape).clone()


def pools(
    dtype: torch.dtype = torch.float16, blocks: int = 6, block: int = 4, heads: int = 2, seed: int = 1
) -> Pools:
    made = [noise(dtype, blocks, block, heads, 8, seed=seed + plane) for plane in range(4)]
    return [(made[0], made[1]), (made[2], made[3])]


def rows(cache: Pools, slots: Sequence[int]) -> list[bytes]:
    """Of every plane, the bytes of the slots one after another."""
    found = []
    for pool in (pool for pair in cache for pool in pair):
        size = pool.shape[1]
        picked = [pool[slot // size, slot % size] for slot in slots]
        found.append(b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in picked))
    return found


class Bed:
    """A prefill shard `p` with a device, its arena and its clock; shard `d` reads."""

    def __init__(self, root: Path) -> None:
        options = (0, 1, FINGERPRINT, MEBIBYTE, 60.0)
        self.writer = ArenaBridge(root, "dep", "p", *options, index_slots=16, pinned_bytes=4096)
        self.reader = ArenaBridge(root, "dep", "d", *options, index_slots=16)
        self.streams = StepStreams()
        self.now_s = 0.0
        self.outcomes: list[str] = []

    def pool(self, cache: Pools, *, direct: bool = True, limits: Limits = ROOMY) -> DevicePool:
        return DevicePool(
            cache, self.streams, direct=lambda memory: direct, limits=limits, clock=lambda: self.now_s
        )

    def reserve(
        self, number: int, tokens: int, *, pinned: bool = False
    ) -> Callable[[Sequence[int]], Reservation]:
        return lambda sizes: self.writer.reserve(
            handle(number), range(tokens), FIRST, False, sizes, checked=False, pinned=pinned
        )

    def done(self, miss: BridgeMiss | None) -> None:
        self.outcomes.append("published" if miss is None else str(miss.reason))

    def export(
        self, pool: DevicePool, number: int = 1, slots: Sequence[int] = SLOTS, *, pinned: bool = False
    ) -> None:
        pool.export(slots, self.reserve(number, len(slots), pinned=pinned), self.done)

    def record(self, number: int = 1) -> Record:
        return self.reader.lookup("p", 1, handle(number))

    def read(self, number: int = 1, planes: int = 4) -> list[bytes]:
        record = self.record(number)
        targets = [bytearray(row * len(record.token_ids)) for row in record.rows]
        self.reader.read_into(record, [[memoryview(target)] for target in targets], len(record.token_ids))
        assert len(targets) == planes
        return [bytes(target) for target in targets]


class FakeRuntime:
    """Answers `error` to every call that is named in `failing`."""

    def __init__(self, *, reads_only: bool = True, failing: frozenset[str] = frozenset()) -> None:
        self._reads_only = reads_only
        self._failing = failing
        self.calls: list[tuple[Any, ...]] = []

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, size_bytes, flags))
        return 801 if "register" in self._failing else 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 713 if "unregister" in self._failing else 0

    def reads_only(self) -> bool:
        return self._reads_only

    def forget_error(self) -> None:
        self.calls.append(("forget_error",))


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, str]] = []

    def __call__(self, event: str, /, **facts: str) -> None:
        self.lines.append({"event": event, **facts})
