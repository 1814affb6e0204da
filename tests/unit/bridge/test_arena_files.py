"""The arena as a file: owners, modes, sizes, locks, restarts, and readers that follow it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.unit.bridge.one_file import (
    MEBIBYTE,
    RING_OFFSET,
    Open,
    arena_file,
    export,
    fetched,
    handle,
    reason_of,
    set_word,
)
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.layout import Word
from tgi_patches.contract import MissReason

# --- owner and mode -------------------------------------------------------------------------------


def test_directories_and_file_are_for_the_owner_and_the_group(open_bridge: Open, root: Path) -> None:
    former = os.umask(0o077)
    try:
        open_bridge("p")
    finally:
        os.umask(former)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, root / "dep", arena_file(root))}
    assert modes == {root: 0o2770, root / "dep": 0o2770, arena_file(root): 0o640}


def test_readers_create_nothing(open_bridge: Open, root: Path) -> None:
    reader = open_bridge("d", ring_bytes=0)
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.MISSING
    assert not root.exists()


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o702])
def test_a_directory_that_everybody_may_write_is_refused(open_bridge: Open, root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ArenaError, match="writable by everyone"):
        open_bridge("p")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("folder", [".", "dep"])
def test_a_reader_does_not_trust_a_directory_that_everybody_may_write(
    open_bridge: Open, root: Path, folder: str
) -> None:
    export(open_bridge("p"), 1)
    (root / folder).chmod(0o777)
    reader = open_bridge("d", ring_bytes=0)
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.ERROR
    (root / folder).chmod(0o770)
    assert fetched(reader, "p", 1) == b"kv of one prompt"


def test_a_linked_directory_is_refused(open_bridge: Open, root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o770)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError, match="not a directory"):
        open_bridge("p")


def test_a_linked_file_is_refused_by_writer_and_reader(open_bridge: Open, root: Path, tmp_path: Path) -> None:
    export(open_bridge("q"), 1)
    arena_file(root, "p").symlink_to(arena_file(root, "q"))
    with pytest.raises(ArenaError, match="symbolic link"):
        open_bridge("p")
    assert reason_of(open_bridge("d").lookup, "p", 1, handle(1)) == MissReason.ERROR


def test_what_belongs_to_another_user_is_refused(
    open_bridge: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(open_bridge("p"), 1)
    reader = open_bridge("d", ring_bytes=0)
    me = root.stat()
    monkeypatch.setattr(os, "geteuid", lambda: me.st_uid + 1)
    monkeypatch.setattr(os, "getegid", lambda: me.st_gid + 1)
    monkeypatch.setattr(os, "getgroups", list)
    owned_by_root = me.st_uid == 0
    if owned_by_root:
        with pytest.raises(ArenaError, match=r"p\.0\.arena belongs to user 0"):
            open_bridge("p", epoch=2)
        assert fetched(reader, "p", 1) == b"kv of one prompt"
    else:
        with pytest.raises(ArenaError, match="not to a group of ours"):
            open_bridge("p", epoch=2)
        assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.ERROR


def test_shards_under_other_users_share_through_the_group(
    open_bridge: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(open_bridge("p"), 1)
    me = root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert fetched(open_bridge("d", ring_bytes=0), "p", 1) == b"kv of one prompt"
    with pytest.raises(ArenaError, match="belongs to user"):
        open_bridge("p", epoch=2)


def test_a_file_that_others_may_write_is_refused(open_bridge: Open, root: Path) -> None:
    writer = open_bridge("p")
    export(writer, 1)
    arena_file(root).chmod(0o660)
    assert reason_of(open_bridge("d").lookup, "p", 1, handle(1)) == MissReason.ERROR
    writer.close()
    with pytest.raises(ArenaError, match="writable by others"):
        open_bridge("p", epoch=2)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a" * 65, "ä"])
def test_names_that_do_not_belong_in_a_path_are_refused(open_bridge: Open, name: str) -> None:
    with pytest.raises(ValueError, match="shard name"):
        open_bridge(name)


# --- size -----------------------------------------------------------------------------------------


def test_an_arena_that_does_not_fit_is_one_sentence_and_no_file(open_bridge: Open, root: Path) -> None:
    with pytest.raises(ArenaError) as caught:
        open_bridge("p", ring_bytes=2**50)
    assert str(caught.value).startswith(f"An arena of 1,073,741,824.0 MiB does not fit into {root}, where ")
    assert str(caught.value).count(". ") == 0
    assert list((root / "dep").iterdir()) == []


def test_a_tmpfs_that_fills_up_meanwhile_is_the_same_sentence(
    open_bridge: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="does not fit"):
        open_bridge("p")
    assert list((root / "dep").iterdir()) == []


def test_an_arena_below_the_least_size_is_refused(open_bridge: Open) -> None:
    with pytest.raises(ArenaError, match="at least 65536 bytes, not 65535"):
        open_bridge("p", ring_bytes=65535)


def test_the_file_is_in_memory_from_the_start(open_bridge: Open, root: Path) -> None:
    open_bridge("p", ring_bytes=MEBIBYTE, index_slots=16)
    found = arena_file(root).stat()
    assert found.st_size == RING_OFFSET + MEBIBYTE
    assert found.st_blocks * 512 >= found.st_size


def test_an_odd_size_is_rounded_up_to_pages(open_bridge: Open) -> None:
    assert open_bridge("p", ring_bytes=100_000).ring_bytes == 102_400


# --- restarts -------------------------------------------------------------------------------------


def test_a_restart_reuses_the_file_and_empties_it(open_bridge: Open, root: Path) -> None:
    first = open_bridge("p")
    export(first, 1)
    before = arena_file(root).stat()
    first.close()
    reader = open_bridge("d")
    assert fetched(reader, "p", 1) == b"kv of one prompt"

    second = open_bridge("p", epoch=2)
    after = arena_file(root).stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.EPOCH
    assert reason_of(reader.lookup, "p", 2, handle(1)) == MissReason.MISSING
    export(second, 2, b"kv of another prompt")
    assert fetched(reader, "p", 2, epoch=2) == b"kv of another prompt"


def test_virtual_offsets_grow_across_restarts(open_bridge: Open) -> None:
    positions = []
    for epoch in range(1, 4):
        writer = open_bridge("p", epoch=epoch)
        export(writer, 1)
        positions.append(writer.own_lookup(handle(1)).place.position)
        writer.close()
    assert positions[0] < positions[1] < positions[2]


def test_another_size_makes_another_file_and_readers_follow(open_bridge: Open, root: Path) -> None:
    first = open_bridge("p")
    export(first, 1)
    reader = open_bridge("d")
    record = reader.lookup("p", 1, handle(1))
    first.close()

    second = open_bridge("p", ring_bytes=2 * MEBIBYTE, epoch=2)
    export(second, 2, b"kv of another prompt")
    assert arena_file(root).stat().st_size == RING_OFFSET + 2 * MEBIBYTE
    assert fetched(reader, "p", 2, epoch=2) == b"kv of another prompt"
    late = [[memoryview(bytearray(16))]]
    assert reason_of(reader.read_into, record, late, 2) == MissReason.EPOCH


@pytest.mark.parametrize("word", [Word.MAGIC, Word.VERSION, Word.RING_BYTES])
def test_a_half_written_or_foreign_file_is_replaced(open_bridge: Open, root: Path, word: int) -> None:
    open_bridge("p").close()
    set_word(arena_file(root), word, 0)
    keep = arena_file(root).open("rb")  # so that the inode number is not given out again
    with keep:
        assert reason_of(open_bridge("d").lookup, "p", 1, handle(1)) == MissReason.LAYOUT
        writer = open_bridge("p", epoch=2)
        assert arena_file(root).stat().st_ino != os.fstat(keep.fileno()).st_ino
    export(writer, 1)
    assert fetched(open_bridge("e"), "p", 1, epoch=2) == b"kv of one prompt"


def test_a_file_without_its_memory_is_replaced(open_bridge: Open, root: Path) -> None:
    """A sparse file would kill the writer with SIGBUS when the tmpfs is full."""
    open_bridge("p").close()
    path = arena_file(root)
    header, size = path.read_bytes()[:4096], path.stat().st_size
    path.unlink()
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
    path.chmod(0o640)
    assert path.stat().st_blocks * 512 < size
    open_bridge("p", epoch=2)
    assert path.stat().st_blocks * 512 >= size


@pytest.mark.parametrize("size", [0, 100, 4096, 9000])
def test_a_reader_refuses_a_short_file(open_bridge: Open, root: Path, size: int) -> None:
    open_bridge("p").close()
    content = arena_file(root).read_bytes()[:size]
    arena_file(root, "q").write_bytes(content)
    arena_file(root, "q").chmod(0o640)
    assert reason_of(open_bridge("d").lookup, "q", 1, handle(1)) == MissReason.LAYOUT


def test_the_files_of_removed_shards_are_let_go(open_bridge: Open, root: Path) -> None:
    def mapped(name: str) -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(f"{name}.0.arena" in line for line in lines)

    for shard in ("p", "q"):
        writer = open_bridge(shard)
        export(writer, 1)
        writer.close()
    reader = open_bridge("d", ring_bytes=0)
    fetched(reader, "p", 1)
    assert (mapped("p"), mapped("q")) == (1, 0)
    arena_file(root).unlink()
    fetched(reader, "q", 1)
    assert (mapped("p"), mapped("q")) == (0, 1)
    assert reason_of(reader.lookup, "p", 1, handle(1)) == MissReason.MISSING


def test_closing_unmaps_and_closes_everything(open_bridge: Open, root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    writer, reader = open_bridge("p"), open_bridge("d")
    export(writer, 1)
    fetched(reader, "p", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    writer.close()
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert ".arena" not in Path("/proc/self/maps").read_text()
