"""What each key uses now, counted over all workers of a gateway without a lock between them.

One mapped file per worker: it writes only its own, and reads those of the others.
    file:  magic, generation, ... | row | row | ...
    row:   name, open, step, requests, tokens, then of each of 16 steps: requests and tokens before it
Counts only grow; what a window holds is the count now less the count before its first step.  A worker
keeps its file locked while it lives, so that nobody counts what a dead one left open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

from orchestrator.access.window import first_step
from orchestrator.errors import ConfigError

ROWS = 1024
_MAGIC = 0x7467_696F_6B65_7931
_HEADER = 8
_ROW = 40
_KEPT = 16
"""Steps whose beginning is kept: those of a window, and some for a reader that is a moment behind."""
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.05
_NAME, _OPEN, _STEP, _REQUESTS, _TOKENS, _BEFORE = range(6)
_BYTES = 8 * (_HEADER + _ROW * ROWS)


def name_of(key_name: str) -> int:
    """A key's name as a row carries it; never 0."""
    return int.from_bytes(hashlib.sha256(key_name.encode()).digest()[:7], "big") + 1


class Rows:
    """One worker's file, as anybody may read it."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(-1 if descriptor is None else descriptor, _BYTES)
        self.cells = memoryview(self._map).cast("q")
        self._generation = -1
        self._at: dict[int, int] = {}

    def close(self) -> None:
        self.cells.release()
        self._map.close()
        if self.descriptor is not None:
            os.close(self.descriptor)

    def find(self, name: int) -> int | None:
        """Where the row of a key begins."""
        if self.cells[1] != self._generation:
            self._generation = self.cells[1]
            self._at = dict(self._named()) if self.cells[0] == _MAGIC else {}
        return self._at.get(name)

    def _named(self) -> Iterable[tuple[int, int]]:
        for at in range(_HEADER, len(self.cells), _ROW):
            if self.cells[at + _NAME]:
                yield self.cells[at + _NAME], at

    def open_in(self, at: int) -> int:
        return self.cells[at + _OPEN]

    def used_from(self, at: int, step: int, count: int) -> int:
        """Requests or tokens (`count`: 0 or 1) counted in `step` or later."""
        cells, last = self.cells, self.cells[at + _STEP]
        if last < step or last - step >= _KEPT:
            return 0
        before = cells[at + _BEFORE + 2 * (step % _KEPT) + count]
        return cells[at + _REQUESTS + count] - before

    def alive(self) -> bool:
        """True while some process holds the file as its own."""
        if self.descriptor is None:
            return True
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return False


class OwnRows(Rows):
    """The file of this worker.  ConfigError when another process has it."""

    def __init__(self, descriptor: int | None, where: str = "") -> None:
        super().__init__(descriptor)
        if descriptor is not None and not _locked(descriptor):
            self.close()
            raise ConfigError(f"{where} is held by another process: each worker needs its own number.")
        cells = self.cells
        if cells[0] != _MAGIC:
            self._map[:] = bytes(_BYTES)
            cells[0] = _MAGIC
        for _, at in self._named():
            cells[at + _OPEN] = 0

    def take(self, wanted: Iterable[int], step: int) -> dict[int, int]:
        """Where each name's row begins, made where there was none.  ConfigError when there is no room.

        A row is used again once its key is gone, its requests have ended and its minute is over.
        """
        names = set(wanted)
        taken = {name: at for name, at in self._named() if name in names}
        free = (at for at in range(_HEADER, len(self.cells), _ROW) if self._is_free(at, names, step))
        for name in names - taken.keys():
            at = next(free, None)
            if at is None:
                raise ConfigError(f"At most {ROWS} API keys can have limits.")
            self.cells[at : at + _ROW] = memoryview(bytes(8 * _ROW)).cast("q")
            self.cells[at + _STEP] = step
            self.cells[at + _NAME] = name
            taken[name] = at
        self.cells[1] += 1
        return taken

    def _is_free(self, at: int, wanted: set[int], step: int) -> bool:
        cells = self.cells
        name = cells[at + _NAME]
        over = not first_step(step) <= cells[at + _STEP] <= step
        return name == 0 or (name not in wanted and cells[at + _OPEN] == 0 and over)

    def add(self, at: int, step: int, *, requests: int = 0, tokens: int = 0, opened: int = 0) -> None:
        cells = self.cells
        if cells[at + _STEP] != step:
            self._advance(at, step)
        cells[at + _OPEN] += opened
        if requests:
            cells[at + _REQUESTS] += requests
        if tokens:
            cells[at + _TOKENS] += tokens

    def _advance(self, at: int, step: int) -> None:
        """Note what was counted before each step that has begun; the step itself last, for readers."""
        cells = self.cells
        last = cells[at + _STEP]
        # A clock that began anew (the machine was started again): every step is new.
        first = max(last + 1, step - _KEPT + 1) if last < step else step - _KEPT + 1
        for one in range(first, step + 1):
            cells[at + _BEFORE + 2 * (one % _KEPT)] = cells[at + _REQUESTS]
            cells[at + _BEFORE + 2 * (one % _KEPT) + 1] = cells[at + _TOKENS]
        cells[at + _STEP] = step


class Tally:
    """This worker's rows and those of the others."""

    def __init__(self, shared: Path | None, worker: int, workers: int) -> None:
        self._others: list[Rows] = []
        self._rows: dict[int, int] = {}
        if shared is None:
            self._own = OwnRows(None)
            self.add = self._own.add
            return
        with contextlib.ExitStack() as undo:
            try:
                shared.mkdir(mode=0o700, parents=True, exist_ok=True)
                own = shared / f"limits-{worker}"
                self._own = OwnRows(_opened(own), str(own))
                self.add = self._own.add
                undo.callback(self.close)
                for other in range(workers):
                    if other != worker:
                        self._others.append(Rows(_opened(shared / f"limits-{other}")))
            except OSError as error:
                raise ConfigError(
                    f"Limits cannot be counted in {shared}: {error.strerror or error}."
                ) from None
            undo.pop_all()

    def close(self) -> None:
        for rows in (self._own, *self._others):
            rows.close()

    def take(self, key_names: Iterable[str], step: int) -> dict[str, tuple[int, int]]:
        """Of each key its name in the rows and the place of its own row."""
        names = {key_name: name_of(key_name) for key_name in key_names}
        rows = self._own.take(names.values(), step)
        return {key_name: (name, rows[name]) for key_name, name in names.items()}

    def used_from(self, name: int, at: int, step: int, count: int) -> int:
        """Of all workers: requests (`count` 0) or tokens (1) of `step` and later."""
        used = self._own.used_from(at, step, count)
        for rows in self._others:
            there = rows.find(name)
            if there is not None:
                used += rows.used_from(there, step, count)
        return used

    def open_requests(self, name: int, at: int, *, checked: bool = False) -> int:
        """Of all workers; `checked` leaves out those that are dead, which costs a system call each."""
        opened = self._own.open_in(at)
        for rows in self._others:
            there = rows.find(name)
            if there is not None and (there := rows.open_in(there)) and not (checked and not rows.alive()):
                opened += there
        return opened


def _locked(descriptor: int) -> bool:
    """True once the file is ours.  A predecessor may be about to end, a reader may be asking who lives."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def _opened(path: Path) -> int:
    """A descriptor of the file, made in its full size if need be."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(descriptor).st_size != _BYTES:
        os.ftruncate(descriptor, _BYTES)
    return descriptor
