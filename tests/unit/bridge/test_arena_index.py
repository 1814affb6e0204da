"""Header and index of an arena file, byte by byte: order of publication, damage, counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.conftest import Interrupted
from tests.unit.bridge.one_file import (
    RING_OFFSET,
    SLOTS_OFFSET,
    Open,
    arena_file,
    export,
    get_word,
    handle,
    reason_of,
    set_word,
)
from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.layout import Word
from tgi_patches.contract import MissReason


def test_a_raised_tail_alone_takes_records_away(open_bridge: Open, root: Path) -> None:
    """The owner raises it before it overwrites anything, and may die right after."""
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    record = reader.lookup("p", 1, handle(1))
    target = [[memoryview(bytearray(16))]]
    set_word(arena_file(root), Word.TAIL, record.place.position)
    reader.read_into(record, target, 2)
    set_word(arena_file(root), Word.TAIL, record.place.position + 1)
    assert reason_of(reader.read_into, record, target, 2) == MissReason.OVERWRITTEN
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.OVERWRITTEN


@pytest.mark.parametrize("byte", range(8, 176, 8))
def test_a_damaged_slot_is_noticed(open_bridge: Open, root: Path, byte: int) -> None:
    """8 and on: its checksum, the handle, place and description."""
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    with arena_file(root).open("r+b") as file:
        file.seek(SLOTS_OFFSET + 256 + byte)  # sequence 1 stands in slot 1
        before = file.read(1)[0]
        file.seek(SLOTS_OFFSET + 256 + byte)
        file.write(bytes([before ^ 4]))
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.CHECKSUM


def test_damaged_token_ids_are_noticed(open_bridge: Open, root: Path) -> None:
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    with arena_file(root).open("r+b") as file:
        file.seek(RING_OFFSET)
        assert file.read(8) == bytes([1, 0, 0, 0, 2, 0, 0, 0])
        file.seek(RING_OFFSET)
        file.write(b"\x03")
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.CHECKSUM


def test_the_header_counts(open_bridge: Open, root: Path) -> None:
    """Three of 16 slots' worth overwritten: 19 exports into 16 slots, none expired."""
    writer = open_bridge("p", index_slots=16)
    for number in range(19):
        export(writer, number)
    counts = [get_word(arena_file(root), w) for w in (Word.EXPORTS, Word.EXPORTED_BYTES, Word.OVERWRITTEN)]
    assert counts == [19, 19 * 16, 3]


def test_the_header_shows_what_is_free_to_pin(open_bridge: Open, root: Path) -> None:
    """A record of 16 bytes takes two lines of 64: what describes it, and its data."""
    bridge = open_bridge("p", pinned_bytes=100)
    seen = []
    for step in ("start", "pin", "release"):
        if step == "pin":
            planes = [[memoryview(b"kv of one prompt")]]
            bridge.export(handle(1), [1, 2], FirstToken(5, -0.5), False, planes, pinned=True)
        elif step == "release":
            bridge.release(handle(1))
        seen.append([get_word(arena_file(root), w) for w in (Word.PINNED_BYTES, Word.PINNED_FREE_BYTES)])
    assert seen == [[4096, 4096], [4096, 4096 - 128], [4096, 4096]]


def test_a_handle_that_lies_across_slots_by_chance_is_not_found(open_bridge: Open, root: Path) -> None:
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    with arena_file(root).open("r+b") as file:
        file.seek(4096 + 3)
        file.write(bytes.fromhex(handle(7)))
    assert reason_of(reader.lookup, "p", 1, handle(7)) == MissReason.MISSING


def test_a_key_that_points_to_anothers_slot_is_not_believed(open_bridge: Open, root: Path) -> None:
    """Slot 1 is whole, but its entry says whose it is."""
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    with arena_file(root).open("r+b") as file:
        file.seek(4096 + 16)
        assert file.read(16) == bytes.fromhex(handle(1))
        file.seek(4096 + 16)
        file.write(bytes.fromhex(handle(7)))
    assert reason_of(reader.lookup, "p", 1, handle(7)) == MissReason.MISSING


def test_everything_is_announced_before_the_first_byte_is_overwritten(open_bridge: Open, root: Path) -> None:
    """Three records of 16 KiB fill a ring of 64 KiB; the fourth stops where it starts to copy."""
    writer = open_bridge("p", ring_bytes=65536)
    kv = bytes(range(256)) * 64
    for number in (1, 2, 3):
        export(writer, number, kv)
    first, second = (writer.own_lookup(handle(number)).place.position for number in (1, 2))
    assert get_word(arena_file(root), Word.TAIL) == first
    seen: list[tuple[int, int, int, bool]] = []

    def look() -> None:
        slots = [get_word(arena_file(root), (SLOTS_OFFSET + 256 * number) // 8) for number in (1, 4)]
        ring = arena_file(root).read_bytes()[RING_OFFSET:]
        seen.append((get_word(arena_file(root), Word.TAIL), slots[0], slots[1], ring.count(kv) == 3))

    planes = Interrupted([[memoryview(bytes(16384))]], 2, look)
    writer.export(handle(4), [1, 2], FirstToken(5, -0.5), False, planes)
    assert seen == [(second, 0, 0, True)]
    assert get_word(arena_file(root), (SLOTS_OFFSET + 256 * 4) // 8) == 4


def test_a_restart_leaves_nothing_in_the_index(open_bridge: Open, root: Path) -> None:
    first = open_bridge("p")
    export(first, 1)
    first.close()
    assert any(arena_file(root).read_bytes()[4096:RING_OFFSET])
    open_bridge("p", epoch=2)
    assert not any(arena_file(root).read_bytes()[4096:RING_OFFSET])
