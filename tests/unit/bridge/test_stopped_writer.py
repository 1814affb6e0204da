"""A writer that stops at any line of its code: what its readers and its successor find."""

from __future__ import annotations

import fcntl
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from tests.unit.bridge.conftest import FINGERPRINT, RING_BYTES
from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.layout import Word
from tgi_patches.contract import BridgeMiss

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(BaseException):
    """Stands for the end of the process: nobody handles it."""


def stop_at(line: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> bool:
    """Run `call` and stop it before the `line`-th line of bridge code; False if it ended before."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if "tgi_patches/bridge" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Stopped
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*args, **kwargs)
    except Stopped:
        return True
    finally:
        sys.settrace(former)
    return False


def open_arena(
    root: Path, shard: str, epoch: int, ring_bytes: int = RING_BYTES, pinned_bytes: int = 0
) -> ArenaBridge:
    return ArenaBridge(
        root,
        "d",
        shard,
        0,
        epoch,
        FINGERPRINT,
        ring_bytes,
        60.0,
        pinned_bytes=pinned_bytes,
        index_slots=8,
    )


def open_into(opened: list[ArenaBridge], root: Path) -> None:
    opened.append(open_arena(root, "p", 2))


def die(path: Path) -> None:
    """What the kernel does for a process that is gone: its locks on `path` end."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and entry.readlink() == path:
            fcntl.flock(int(entry.name), fcntl.LOCK_UN)


def assert_only_whole_epochs(path: Path) -> None:
    """The old epoch stands over an untouched index, the new one over an empty one, or none stands."""
    content = path.read_bytes()
    words = memoryview(content)[:4096].cast("Q")
    index = content[4096 : len(content) - RING_BYTES]
    if words[Word.EPOCH] == 1:
        assert any(index)
        assert words[Word.TAIL] < words[Word.HEAD]
    elif words[Word.EPOCH] == 2:
        assert not any(index)
        assert words[Word.TAIL] == words[Word.HEAD]


def data_of(epoch: int, number: int) -> bytes:
    return random.Random(1000 * epoch + number).randbytes(16_000)


def export_one(bridge: ArenaBridge, epoch: int, number: int, *, pinned: bool = False) -> None:
    views = [[memoryview(data_of(epoch, number))]]
    ids, first = [epoch, number], FirstToken(number, 0.0)
    bridge.export(f"{number:032x}", ids, first, False, views, pinned=pinned)


def replace_pinned(bridge: ArenaBridge) -> None:
    """Record 1, which fills the region, makes way for record 5."""
    bridge.release(f"{1:032x}")
    export_one(bridge, 1, 5, pinned=True)


def outcome(reader: ArenaBridge, epoch: int, number: int) -> str:
    """`right`, or the reason of the miss; a record with anything wrong in it fails the test."""
    target = bytearray(16_000)
    try:
        record = reader.lookup("p", epoch, f"{number:032x}")
        reader.read_into(record, [[memoryview(target)]], 2)
    except BridgeMiss as miss:
        return str(miss.reason)
    assert (record.token_ids, record.first.id) == ((epoch, number), number)
    assert target == data_of(epoch, number)
    return "right"


def test_a_writer_that_stops_at_any_line_of_an_export_leaves_no_wrong_record(tmp_path: Path) -> None:
    """The ring holds four such records: the fifth export overwrites the first."""
    fates = []
    for line in range(1000):
        root = tmp_path / str(line)
        owner, reader = open_arena(root, "p", 1), open_arena(root, "r", 1, 0)
        for number in range(1, 5):
            export_one(owner, 1, number)
        stopped = stop_at(line, export_one, owner, 1, 5)
        fates.append([outcome(reader, 1, number) for number in range(1, 6)])
        owner.close()
        again = open_arena(root, "p", 2)
        assert {outcome(reader, 1, number) for number in range(1, 6)} == {"epoch"}
        export_one(again, 2, 6)
        assert outcome(reader, 2, 6) == "right"
        again.close()
        reader.close()
        if not stopped:
            break
    assert len(fates) > 50
    assert all(fate[1:4] == ["right"] * 3 for fate in fates)
    assert fates[0] == ["right", "right", "right", "right", "missing"]
    assert fates[-1] == ["overwritten", "right", "right", "right", "right"]
    assert not any(first == "right" == fifth for first, *_, fifth in fates)


def test_a_writer_that_stops_while_it_replaces_a_pinned_record_leaves_no_wrong_one(tmp_path: Path) -> None:
    fates = []
    for line in range(1000):
        root = tmp_path / str(line)
        owner, reader = open_arena(root, "p", 1, pinned_bytes=16384), open_arena(root, "r", 1, 0)
        export_one(owner, 1, 1, pinned=True)
        export_one(owner, 1, 2)
        stopped = stop_at(line, replace_pinned, owner)
        fates.append([outcome(reader, 1, number) for number in (1, 2, 5)])
        owner.close()
        again = open_arena(root, "p", 2, pinned_bytes=16384)
        assert {outcome(reader, 1, number) for number in (1, 2, 5)} == {"epoch"}
        export_one(again, 2, 6, pinned=True)
        assert outcome(reader, 2, 6) == "right"
        again.close()
        reader.close()
        if not stopped:
            break
    assert len(fates) > 50
    assert fates[0] == ["right", "right", "missing"]
    assert fates[-1] == ["missing", "right", "right"]
    assert all(fate[1] == "right" and (fate[0], fate[2]) != ("right", "right") for fate in fates)


def test_a_writer_that_stops_at_any_line_of_its_start_leaves_no_wrong_record(tmp_path: Path) -> None:
    fates = []
    for line in range(1000):
        root = tmp_path / str(line)
        owner, reader = open_arena(root, "p", 1), open_arena(root, "r", 1, 0)
        export_one(owner, 1, 1)
        assert outcome(reader, 1, 1) == "right"
        owner.close()
        halves: list[ArenaBridge] = []
        stopped = stop_at(line, open_into, halves, root)
        fates.append((outcome(reader, 1, 1), outcome(reader, 2, 1), outcome(reader, 0, 1)))
        assert_only_whole_epochs(root / "d" / "p.0.arena")
        for half in halves:
            half.close()
        die(root / "d" / "p.0.arena")
        third = open_arena(root, "p", 3)
        assert outcome(reader, 1, 1) == outcome(reader, 2, 1) == "epoch"
        export_one(third, 3, 1)
        assert outcome(reader, 3, 1) == "right"
        third.close()
        reader.close()
        if not stopped:
            break
    assert len(fates) > 50
    assert fates[0] == ("right", "epoch", "epoch")
    assert fates[-1] == ("epoch", "missing", "epoch")
    assert {fate[0] for fate in fates} == {"right", "epoch"}
    assert all(fate[1] != "right" and fate[2] != "right" for fate in fates)
