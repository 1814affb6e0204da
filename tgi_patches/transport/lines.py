"""Whole lines through a FIFO beside an arena: how a sidecar and its server process speak to each other.

A line of at most PIPE_BUF bytes is written at once or not at all, and nobody waits.  No socket, no thread:
the reader is called by its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import stat
from collections.abc import Callable
from pathlib import Path

LINE_BYTES = select.PIPE_BUF
_READ_BYTES = 64 * 1024


class LineWriter:
    """Nothing here waits or raises; a line that cannot be written is lost, and False."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def write(self, line: str) -> bool:
        data = f"{line}\n".encode()
        if len(data) > LINE_BYTES:
            return False
        for _ in range(2):
            try:
                if self._fd is None:
                    self._fd = opened(self._path, os.O_WRONLY)
                os.write(self._fd, data)
                return True
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return False
                self.close()  # the reader left: perhaps another one has opened the pipe since
                if error.errno != errno.EPIPE:
                    return False
        return False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LineReader:
    """Calls `on_line` for every whole line, from the running event loop."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._rest = b""
        self._fd: int | None = None

    def open(self) -> None:
        """Make the FIFO if it is not there and listen.  Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        # For writing too: with a writer of our own the pipe never reports its end between two processes.
        self._fd = opened(self._path, os.O_RDWR)
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
        self._rest = self._rest[-LINE_BYTES:]
        for line in lines:
            self._on_line(line.decode(errors="replace"))


def opened(path: Path, access: int) -> int:
    """A descriptor of the FIFO; FileExistsError where something else stands there."""
    fd = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(errno.EEXIST, "not a FIFO", str(path))
    return fd
