"""How the ranks of one shard come to the same decision: a few words of shared memory, no collective.

Ranks run the same requests in the same order, so the n-th question of each is the same one.  Every rank
writes (round, number) to a word of its own; rank 0 alone reads them and writes (round, verdict), which is
what all return: the number where all gave the same one in time, else 0.  The others wait for it however
long that takes, as they would in the next collective: whoever gave up would act on a verdict of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from tgi_patches.bridge import ArenaError

VOTES_LIMIT_S = 10.0
"""How long rank 0 waits for the others, who run the same step at the same time."""
OPEN_LIMIT_S = 60.0

NUMBER_BITS = 24
"""Of a word; the rest counts rounds.  Numbers are tokens of a prompt."""
_EPOCH, _VERDICT, _VOTES = 0, 1, 2
_WORD_BYTES = 8
_SPINS = 500
_PAUSE_S = 50e-6


class Ballot:
    """One rank's side; `close` lets go of the memory.  One thread."""

    def __init__(
        self, path: Path, epoch: int, rank: int, ranks: int, *, open_limit_s: float = OPEN_LIMIT_S
    ) -> None:
        """Rank 0 makes the file, the others wait for that of the same epoch.  Raises ArenaError."""
        self._rank = rank
        self._ranks = ranks
        self._round = 0
        try:
            self._mmap = _made(path, epoch, ranks) if rank == 0 else _found(path, epoch, ranks, open_limit_s)
        except OSError as error:
            raise ArenaError(f"The ranks of a shard cannot meet in {path}: {error.strerror}.") from None
        self._words = memoryview(self._mmap).cast("Q")

    def agree(self, number: int, votes_limit_s: float = VOTES_LIMIT_S) -> int:
        """`number` on every rank if all gave it within rank 0's `votes_limit_s`, else 0 on every rank."""
        self._round += 1
        own = self._round << NUMBER_BITS | min(number, (1 << NUMBER_BITS) - 1)
        if self._rank == 0:
            verdict = number if self._all_gave(own, votes_limit_s) else 0
            self._words[_VERDICT] = self._round << NUMBER_BITS | verdict
            return verdict
        self._words[_VOTES + self._rank] = own
        _until(lambda: self._words[_VERDICT] >> NUMBER_BITS >= self._round, None)
        return number if self._words[_VERDICT] == own else 0

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):
            self._mmap.close()

    def _all_gave(self, own: int, limit_s: float) -> bool:
        votes = self._words[_VOTES + 1 : _VOTES + self._ranks]
        _until(lambda: all(vote >> NUMBER_BITS >= self._round for vote in votes), limit_s)
        return all(vote == own for vote in votes)


def ballot_path(directory: Path, deployment: str, shard: str) -> Path:
    """Beside the arenas of the same shard."""
    return directory / deployment / f"{shard}.ballot"


def _until(happened: Callable[[], bool], limit_s: float | None) -> None:
    end_s = None if limit_s is None else time.monotonic() + limit_s
    spins = 0
    while not happened() and (end_s is None or time.monotonic() < end_s):
        spins += 1
        time.sleep(0 if spins < _SPINS else _PAUSE_S)


def _size(ranks: int) -> int:
    return _WORD_BYTES * (_VOTES + ranks)


def _made(path: Path, epoch: int, ranks: int) -> mmap.mmap:
    """A new file, complete before it stands at `path`."""
    new = path.with_suffix(".ballot-new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, epoch.to_bytes(_WORD_BYTES, "little") + bytes(_size(ranks) - _WORD_BYTES))
        mapped = mmap.mmap(fd, _size(ranks))
    finally:
        os.close(fd)
    new.replace(path)
    return mapped


def _found(path: Path, epoch: int, ranks: int, limit_s: float) -> mmap.mmap:
    end_s = time.monotonic() + limit_s
    while (mapped := _of_epoch(path, epoch, ranks)) is None:
        if time.monotonic() > end_s:
            raise ArenaError(f"Rank 0 did not make {path} within {limit_s:g} s.")
        time.sleep(0.01)
    return mapped


def _of_epoch(path: Path, epoch: int, ranks: int) -> mmap.mmap | None:
    """None for a file that is not there yet, or is a former incarnation's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.fstat(fd).st_size != _size(ranks):
            return None
        if int.from_bytes(os.pread(fd, _WORD_BYTES, 0), "little") != epoch:
            return None
        return mmap.mmap(fd, _size(ranks))
    finally:
        os.close(fd)
