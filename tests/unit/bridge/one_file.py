"""Bridges over one folder of arena files, and a look into the files themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=2, kv_heads=3, head_dim=64)
MEBIBYTE = 2**20
SLOTS_OFFSET = 4096 + 16 * 16
"""With 16 slots: a page of header, 16 keys of 16 bytes, slots of 256, the ring on the next page."""
RING_OFFSET = 12288
Open = Callable[..., ArenaBridge]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


@pytest.fixture
def open_bridge(root: Path) -> Iterator[Open]:
    opened: list[ArenaBridge] = []

    def open_one(
        shard: str, ring_bytes: int = MEBIBYTE, epoch: int = 1, index_slots: int = 16, pinned_bytes: int = 0
    ) -> ArenaBridge:
        bridge = ArenaBridge(
            root,
            "dep",
            shard,
            0,
            epoch,
            FINGERPRINT,
            ring_bytes,
            60.0,
            pinned_bytes=pinned_bytes,
            index_slots=index_slots,
        )
        opened.append(bridge)
        return bridge

    yield open_one
    for bridge in opened:
        bridge.close()


def handle(number: int) -> str:
    return f"{number:032x}"


def export(bridge: ArenaBridge, number: int, data: bytes = b"kv of one prompt") -> None:
    bridge.export(handle(number), [1, 2], FirstToken(5, -0.5), False, [[memoryview(data)]])


def fetched(bridge: ArenaBridge, shard: str, number: int, epoch: int = 1) -> bytes:
    record = bridge.lookup(shard, epoch, handle(number))
    target = bytearray(record.kv_bytes)
    bridge.read_into(record, [[memoryview(target)]], 2)
    return bytes(target)


def reason_of(call: Callable[..., object], *arguments: Any, **options: Any) -> MissReason:
    with pytest.raises(BridgeMiss) as caught:
        call(*arguments, **options)
    return caught.value.reason


def arena_file(root: Path, shard: str = "p") -> Path:
    return root / "dep" / f"{shard}.0.arena"


def set_word(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(8 * word)
        file.write(value.to_bytes(8, "little"))


def get_word(path: Path, word: int) -> int:
    return int.from_bytes(path.read_bytes()[8 * word : 8 * word + 8], "little")
