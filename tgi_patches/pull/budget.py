"""So many bytes at a time, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """Nobody may take more than `limit_bytes` at once; callers see to that."""

    def __init__(self, limit_bytes: int) -> None:
        self.free_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Wait for `size` bytes, and give them back at the end."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.free_bytes += size
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if size > self.free_bytes:
                    return
                self.free_bytes -= size
                turn.set_result(None)
            self._waiting.popleft()
