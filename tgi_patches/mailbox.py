"""How a server process tells its sidecar that a record was published, or will never come.

A FIFO beside the arena: the server writes a line of at most PIPE_BUF bytes, which is atomic, and never
waits; without a reader, or with a full pipe, the line is lost and a waiter finds out by its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tgi_patches.contract import ContractError, MissReason, checked_handle

PUBLISHED = "published"
_READ_BYTES = 64 * 1024


def mailbox_path(directory: Path, deployment: str, shard: str, rank: int) -> Path:
    """Beside the arena of the same shard and rank."""
    return directory / deployment / f"{shard}.{rank}.mailbox"


class Mailbox:
    """The writing end.  Nothing here waits or raises; one thread only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def published(self, handle: str) -> None:
        """The record of `handle` can be looked up."""
        self._post(f"{handle} {PUBLISHED}\n")

    def failed(self, handle: str, reason: MissReason) -> None:
        """No record of `handle` will come."""
        self._post(f"{handle} {reason}\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _post(self, line: str) -> None:
        for _ in range(2):
            try:
                if self._fd is None:
                    self._fd = _opened(self._path, os.O_WRONLY)
                os.write(self._fd, line.encode())
                return
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                self.close()  # the reader left: perhaps another one has opened the pipe since
                if error.errno != errno.EPIPE:
                    return


class MailboxReader:
    """The reading end, on the running event loop; calls back for every whole line."""

    def __init__(
        self,
        path: Path,
        *,
        published: Callable[[str], None],
        failed: Callable[[str, MissReason], None],
    ) -> None:
        self._path = path
        self._published = published
        self._failed = failed
        self._rest = b""
        self._fd: int | None = None

    def open(self) -> None:
        """Make the FIFO if it is not there and listen.  Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        # For writing too: with a writer of our own the pipe never reports its end between two servers.
        self._fd = _opened(self._path, os.O_RDWR)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> None:
        assert self._fd is not None
        try:
            read = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + read).split(b"\n")
        self._rest = self._rest[-select.PIPE_BUF :]
        for handle, word in _letters(lines):
            if word == PUBLISHED:
                self._published(handle)
            else:
                self._failed(handle, MissReason(word))


def _opened(path: Path, access: int) -> int:
    """A descriptor of the FIFO; FileExistsError where something else stands there."""
    fd = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(errno.EEXIST, "not a FIFO", str(path))
    return fd


def _letters(lines: list[bytes]) -> Iterator[tuple[str, str]]:
    """(handle, word) of every line that is one of ours."""
    known = {PUBLISHED, *MissReason}
    for line in lines:
        handle, _, word = line.decode(errors="replace").partition(" ")
        with contextlib.suppress(ContractError):
            if word in known:
                yield checked_handle(handle), word
