"""What an exchange can end in, besides an answer.

HttpError
├── CannotConnect    nobody listens there, or not in time
├── ConnectionLost   it broke before the answer was complete
├── Malformed        what came is no HTTP, or more than is held in memory
└── PoolFull         as many connections as are allowed are busy

A step that takes too long raises TimeoutError, as everywhere in asyncio.
"""

from __future__ import annotations


class HttpError(Exception):
    """Translated by whoever speaks for a shard; no client sees it."""


class CannotConnect(HttpError):
    """`late`: the other side said nothing, not even no."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class ConnectionLost(HttpError):
    """`untouched`: no byte of the answer had come, so the request may not have been read."""

    def __init__(self, *, untouched: bool) -> None:
        super().__init__("The connection broke before the answer was complete.")
        self.untouched = untouched


class Malformed(HttpError):
    pass


class PoolFull(HttpError):
    pass
