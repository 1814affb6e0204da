"""The file in which a deployment's cost book is kept from one start to the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import orjson
import structlog

from orchestrator.core.costbook import CostBook

log = structlog.get_logger()

SAVE_EVERY_S = 30.0
WRITE_WITHIN_S = 5.0
FILE_MOST_BYTES = 1 << 20


class CostFile:
    """Where a deployment's cost book is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def read(self) -> CostBook:
        """What was kept; an empty book where there is none, or none that can be read."""
        try:
            if self._path.stat().st_size > FILE_MOST_BYTES:
                raise ValueError("It is too large.")
            return CostBook.from_dict(orjson.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return CostBook()
        except (OSError, ValueError) as error:
            log.warning("costs_not_read", file=self._path.name, error=str(error))
            return CostBook()

    async def keep(self, book: CostBook, every_s: float = SAVE_EVERY_S) -> None:
        """Until cancelled: write what changed, at most so often, and once more at the end."""
        written = book.changes
        try:
            while True:
                await asyncio.sleep(every_s)
                if book.changes != written:
                    written = await self._save(book)
        finally:
            if book.changes != written:
                await self._save(book)

    async def _save(self, book: CostBook) -> int:
        """The book's `changes` at the time.  What cannot be written is logged once."""
        changes, text = book.changes, orjson.dumps(book.to_dict(), option=orjson.OPT_INDENT_2)
        try:
            async with asyncio.timeout(WRITE_WITHIN_S):
                await asyncio.to_thread(self._replace, text)
        except OSError as error:  # a TimeoutError is one, too
            if not self._failed:
                log.warning("costs_not_saved", file=self._path.name, error=error.strerror or "too slow")
            self._failed = True
        else:
            self._failed = False
        return changes

    def _replace(self, text: bytes) -> None:
        """In one step, so that a reader never sees half of it."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
            fresh.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
