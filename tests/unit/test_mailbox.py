"""A FIFO between two processes: what is posted is heard, and the posting side never waits or raises."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tgi_patches.contract import MissReason
from tgi_patches.mailbox import Mailbox, MailboxReader, mailbox_path

DEADLINE_S = 10.0
PIPE_BYTES = 64 * 1024
"""What a Linux pipe holds."""
LINE_BYTES = 32 + len(" published\n")


def handle(number: int) -> str:
    return f"{number:032x}"


class Heard:
    """A reader, and what it called back."""

    def __init__(self, path: Path) -> None:
        self.lines: list[tuple[str, str]] = []
        self._more = asyncio.Event()
        self.reader = MailboxReader(
            path,
            published=lambda handle: self._heard(handle, "published"),
            failed=lambda handle, reason: self._heard(handle, reason),
        )

    def _heard(self, handle: str, word: str) -> None:
        self.lines.append((handle, word))
        self._more.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self._more.clear()
                await self._more.wait()

    async def until_heard(self, handle: str) -> None:
        await self.until(lambda: handle in [known for known, _ in self.lines])


Listen = Callable[[], Heard]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.0.mailbox"


@pytest.fixture
def mailbox(path: Path) -> Iterator[Mailbox]:
    opened = Mailbox(path)
    yield opened
    opened.close()


@pytest.fixture
async def listen(path: Path) -> Listen:
    def start() -> Heard:
        heard = Heard(path)
        heard.reader.open()
        return heard

    return start


def test_a_mailbox_stands_beside_the_arena() -> None:
    assert mailbox_path(Path("/run/arenas"), "dep", "d0", 1) == Path("/run/arenas/dep/d0.1.mailbox")


async def test_what_is_posted_is_heard_in_order(listen: Listen, mailbox: Mailbox) -> None:
    heard = listen()
    mailbox.published(handle(1))
    for number, reason in enumerate(MissReason, start=2):
        mailbox.failed(handle(number), reason)
    await heard.until(lambda: len(heard.lines) == 1 + len(MissReason))
    reasons = [(handle(number), str(reason)) for number, reason in enumerate(MissReason, start=2)]
    assert heard.lines == [(handle(1), "published"), *reasons]
    assert all(isinstance(word, MissReason) for _, word in heard.lines[1:])
    heard.reader.close()


async def test_without_a_reader_nothing_is_kept_and_nothing_raised(
    path: Path, listen: Listen, mailbox: Mailbox
) -> None:
    mailbox.published(handle(1))
    os.mkfifo(path, 0o600)
    mailbox.failed(handle(2), MissReason.LAYOUT)
    heard = listen()
    mailbox.published(handle(3))
    await heard.until_heard(handle(3))
    assert heard.lines == [(handle(3), "published")]
    heard.reader.close()


async def test_a_reader_that_left_and_came_back_hears_again(listen: Listen, mailbox: Mailbox) -> None:
    first = listen()
    mailbox.published(handle(1))
    await first.until_heard(handle(1))
    first.reader.close()
    mailbox.published(handle(2))
    second = listen()
    mailbox.published(handle(3))
    await second.until_heard(handle(3))
    assert second.lines == [(handle(3), "published")]
    second.reader.close()


async def test_the_first_post_to_a_reader_of_another_fifo_is_not_lost(
    path: Path, listen: Listen, mailbox: Mailbox
) -> None:
    first = listen()
    mailbox.published(handle(1))
    await first.until_heard(handle(1))
    first.reader.close()
    os.unlink(path)  # noqa: PTH108 - does not wait
    second = listen()
    mailbox.published(handle(2))
    await second.until_heard(handle(2))
    second.reader.close()


async def test_a_full_pipe_loses_posts_but_holds_nobody_up(listen: Listen, mailbox: Mailbox) -> None:
    """Nothing reads while this function does not await."""
    heard = listen()
    posted = 2 * PIPE_BYTES // LINE_BYTES
    for number in range(posted):
        mailbox.published(handle(number))
    assert heard.lines == []
    await heard.until_heard(handle(0))
    mailbox.failed(handle(posted), MissReason.ERROR)
    await heard.until_heard(handle(posted))
    *kept, last = heard.lines
    assert kept == [(handle(number), "published") for number in range(len(kept))]
    assert 0 < len(kept) < posted
    assert last == (handle(posted), "error")
    heard.reader.close()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def write(path: Path, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        assert os.write(fd, text) == len(text)
    finally:
        os.close(fd)


GARBAGE = [
    b"\n",
    b"nonsense\n",
    b"\xff\xfe\x00 published\n",
    handle(1).encode() + b"\n",
    handle(1).encode() + b" PUBLISHED\n",
    handle(1).encode() + b" published \n",
    handle(1).encode() + b"  published\n",
    b" " + handle(1).encode() + b" published\n",
    handle(1)[1:].encode() + b" published\n",
    b"Z" * 32 + b" published\n",
    handle(1).encode() + b" published extra\n",
    b"x" * 20_000 + b"\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_lines_that_are_not_ours_are_ignored(garbage: bytes, path: Path, listen: Listen) -> None:
    heard = listen()
    write(path, garbage)
    write(path, f"{handle(7)} published\n".encode())
    await heard.until_heard(handle(7))
    assert heard.lines == [(handle(7), "published")]
    heard.reader.close()


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 40, LINE_BYTES - 1])
async def test_a_line_that_comes_in_two_reads_is_one(cut: int, path: Path, listen: Listen) -> None:
    heard = listen()
    line = f"{handle(2)} published\n".encode()
    write(path, f"{handle(1)} published\n".encode() + line[:cut])
    await heard.until_heard(handle(1))
    write(path, line[cut:] + f"{handle(3)} missing\n".encode())
    await heard.until_heard(handle(3))
    assert heard.lines == [
        (handle(1), "published"),
        (handle(2), "published"),
        (handle(3), "missing"),
    ]
    heard.reader.close()


async def test_two_writers_do_not_tear_each_others_lines(path: Path, listen: Listen) -> None:
    """Two times 300 lines are less than a pipe holds: none may be lost."""
    heard = listen()

    def post(first: int) -> None:
        mailbox = Mailbox(path)
        for number in range(first, first + 300):
            mailbox.published(handle(number))
        mailbox.close()

    threads = [threading.Thread(target=post, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    await heard.until(lambda: len(heard.lines) == 600)
    for thread in threads:
        await asyncio.to_thread(thread.join, DEADLINE_S)
    found = [int(known, 16) for known, _ in heard.lines]
    assert [number for number in found if number < 1000] == list(range(300))
    assert [number for number in found if number >= 1000] == list(range(1000, 1300))
    heard.reader.close()


def test_a_file_that_is_no_fifo_is_refused_and_kept(path: Path) -> None:
    path.write_text("somebody's")
    with pytest.raises(FileExistsError, match="not a FIFO"):
        Heard(path).reader.open()
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo], ids=["to a file", "to a FIFO"])
def test_a_link_is_not_followed(
    make: Callable[[Path], None], path: Path, tmp_path: Path, mailbox: Mailbox
) -> None:
    target = tmp_path / "target"
    make(target)
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Heard(path).reader.open()
    mailbox.published(handle(1))
    assert target.stat().st_size == 0


@pytest.mark.parametrize("there", ["folder", "file", "nothing"])
def test_posting_to_what_is_no_fifo_raises_nothing(there: str, path: Path, mailbox: Mailbox) -> None:
    if there == "folder":
        path.mkdir()
    elif there == "file":
        path.touch()
    mailbox.published(handle(1))
    mailbox.failed(handle(2), MissReason.ERROR)


async def test_a_fifo_is_for_its_owner_only(path: Path, listen: Listen) -> None:
    heard = listen()
    assert mode_of(path) == 0o600
    heard.reader.close()
    heard.reader.close()


async def test_a_reader_uses_the_fifo_that_is_there(path: Path, listen: Listen, mailbox: Mailbox) -> None:
    os.mkfifo(path, 0o600)
    heard = listen()
    mailbox.published(handle(1))
    await heard.until_heard(handle(1))
    heard.reader.close()


def test_a_regular_file_in_the_pipes_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "shard.0.mailbox"
    path.write_text("somebody's")
    mailbox = Mailbox(path)
    mailbox.published("0" * 32)
    mailbox.close()
    assert path.read_text() == "somebody's"
