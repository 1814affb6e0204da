"""One suite for every bridge: a bed is where bridges of one host live, on files or in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, overload

import pytest

from tests.unit.bridge.one_file import open_bridge as open_bridge
from tests.unit.bridge.one_file import root as root
from tgi_patches.bridge import Bridge, FirstToken, Planes, Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=2, kv_heads=3, head_dim=64)
RING_BYTES = 65536
TTL_S = 10.0
FIRST = FirstToken(11, -0.25)
GUARD = 0xAA


@dataclass
class Clock:
    now_ns: int = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns


class Bed(Protocol):
    """Where the bridges of one host live."""

    clock: Clock

    def open(self, shard: str, epoch: int = 1, **options: Any) -> Bridge: ...

    def damage(self, record: Record, data: bytes, offset: int) -> None: ...


class ArenaBed:
    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self.directory = directory
        self.opened: list[ArenaBridge] = []

    def open(self, shard: str, epoch: int = 1, **options: Any) -> Bridge:
        fingerprint = options.pop("fingerprint", FINGERPRINT)
        ring_bytes = options.pop("ring_bytes", RING_BYTES)
        bridge = ArenaBridge(
            self.directory, "d", shard, 0, epoch, fingerprint, ring_bytes, TTL_S, clock=self.clock, **options
        )
        self.opened.append(bridge)
        return bridge

    def damage(self, record: Record, data: bytes, offset: int) -> None:
        """Flip a bit of the data, which is found in the file by its own bytes."""
        path = self.directory / "d" / f"{record.shard}.0.arena"
        with path.open("r+b") as file:
            place = file.read().index(data) + offset
            file.seek(place)
            file.write(bytes([data[offset] ^ 1]))

    def close(self) -> None:
        for bridge in self.opened:
            bridge.close()


class MemoryBed:
    def __init__(self) -> None:
        self.clock = Clock()
        self.host = MemoryHost()
        self.last: MemoryBridge | None = None

    def open(self, shard: str, epoch: int = 1, **options: Any) -> Bridge:
        fingerprint = options.pop("fingerprint", FINGERPRINT)
        ring_bytes = options.pop("ring_bytes", RING_BYTES)
        self.last = MemoryBridge(
            self.host, shard, epoch, fingerprint, ring_bytes, TTL_S, clock=self.clock, **options
        )
        return self.last

    def damage(self, record: Record, data: bytes, offset: int) -> None:
        assert self.last is not None
        self.last.damage(record.handle, offset)


@pytest.fixture(params=["arena", "memory"])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    if request.param == "memory":
        yield MemoryBed()
        return
    arena = ArenaBed(tmp_path / "arenas")
    yield arena
    arena.close()


def handle(number: int) -> str:
    return f"{number:032x}"


def pattern(seed: int, planes: int, size: int) -> list[bytes]:
    noise = random.Random(seed)
    return [noise.randbytes(size) for _ in range(planes)]


def cut(data: bytearray, cuts: Sequence[int] = ()) -> list[memoryview]:
    """The bytes of one plane as runs that end at `cuts`."""
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(edges)]


def runs_of(planes: Sequence[bytes], cuts: Sequence[int] = ()) -> list[list[memoryview]]:
    return [cut(bytearray(plane), cuts) for plane in planes]


def export(bridge: Bridge, number: int, size: int = 400, tokens: int = 4, planes: int = 2) -> Record:
    data = runs_of(pattern(number, planes, size))
    return bridge.export(handle(number), range(tokens), FIRST, False, data)


def read(bridge: Bridge, record: Record, planes: int, size: int, cuts: Sequence[int] = ()) -> list[bytes]:
    targets = [bytearray(size) for _ in range(planes)]
    bridge.read_into(record, [cut(target, cuts) for target in targets], len(record.token_ids))
    return [bytes(target) for target in targets]


def reason_of(call: Callable[..., object], *arguments: Any, **options: Any) -> MissReason:
    with pytest.raises(BridgeMiss) as caught:
        call(*arguments, **options)
    return caught.value.reason


class Interrupted(Sequence[Sequence[memoryview]]):
    """Planes that run `action` when the last of them is taken for the `visit`-th time."""

    def __init__(self, planes: Planes, visit: int, action: Callable[[], object]) -> None:
        self._planes = planes
        self._visits_left = visit
        self._action = action

    def __len__(self) -> int:
        return len(self._planes)

    @overload
    def __getitem__(self, index: int) -> Sequence[memoryview]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[memoryview]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if index == len(self._planes) - 1:
            self._visits_left -= 1
            if self._visits_left == 0:
                self._action()
        return self._planes[index]
