"""One id per arena directory, whoever asks first, and none for a directory that others may write."""

from __future__ import annotations

import multiprocessing
import os
import re
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena_id import NAME, arena_id

PROCESSES = 4
ROUNDS = 25
LIMIT_S = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


def test_the_first_to_ask_makes_the_directory_and_the_id(root: Path) -> None:
    found = arena_id(root)
    assert re.fullmatch(r"[0-9a-f]{32}", found)
    assert root.stat().st_mode & 0o7777 == 0o2770
    assert [path.name for path in root.iterdir()] == [NAME]
    assert (root / NAME).stat().st_mode & 0o7777 == 0o640


def test_whoever_asks_later_gets_the_same_one(root: Path) -> None:
    first = arena_id(root)
    inode = (root / NAME).stat().st_ino
    assert arena_id(root) == first
    assert (root / NAME).stat().st_ino == inode


def test_two_directories_have_two_ids(tmp_path: Path) -> None:
    assert arena_id(tmp_path / "one") != arena_id(tmp_path / "two")


def test_shards_of_other_users_can_read_it_whatever_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        arena_id(root)
    finally:
        os.umask(before)
    assert (root / NAME).stat().st_mode & 0o7777 == 0o640


def ask(folder: Path, start: Barrier, write_fd: int) -> None:
    """In each of several processes: all ask about one directory after another at the same moments."""
    found = []
    for number in range(ROUNDS):
        start.wait(LIMIT_S)
        found.append(arena_id(folder / str(number)))
    os.write(write_fd, " ".join(found).encode())


def test_all_who_ask_at_once_get_the_same_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(PROCESSES)
    answers = []
    for read_fd, write_fd in [os.pipe() for _ in range(PROCESSES)]:
        process = context.Process(target=ask, args=(tmp_path, start, write_fd))
        process.start()
        os.close(write_fd)
        answers.append((process, read_fd))
    said = []
    for process, read_fd in answers:
        process.join(LIMIT_S)
        said.append(os.read(read_fd, 64 * ROUNDS).decode().split())
        os.close(read_fd)
    assert len(set(said[0])) == ROUNDS
    assert said == [said[0]] * PROCESSES
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {NAME}


def test_a_directory_that_everyone_may_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ArenaError, match="is writable by everyone"):
        arena_id(root)
    assert list(root.iterdir()) == []


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path, root: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError, match="links are not followed"):
        arena_id(root)


def test_a_directory_below_nothing_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"cannot be made or read: No such file or directory\.$"):
        arena_id(tmp_path / "missing" / "arenas")


@pytest.mark.parametrize("content", ["", "not an id\n", "0" * 31, "0" * 33, "../" * 12])
def test_what_is_no_id_is_refused_and_left_alone(root: Path, content: str) -> None:
    root.mkdir()
    (root / NAME).write_text(content)
    with pytest.raises(ArenaError, match="holds no arena id"):
        arena_id(root)
    assert (root / NAME).read_text() == content


def test_an_id_that_others_may_write_is_refused(root: Path) -> None:
    arena_id(root)
    (root / NAME).chmod(0o660)
    with pytest.raises(ArenaError, match="holds no arena id"):
        arena_id(root)


@pytest.mark.parametrize("make", ["link", "fifo", "folder"])
def test_what_is_no_file_of_its_own_is_refused_without_waiting(tmp_path: Path, root: Path, make: str) -> None:
    root.mkdir()
    path = root / NAME
    if make == "link":
        (tmp_path / "id").write_text("0" * 32)
        path.symlink_to(tmp_path / "id")
    elif make == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ArenaError):
        arena_id(root)
