"""The newest entries of a mapping: bounded by two generations, the older of which goes as a whole.

Cheaper than a mapping that drops its oldest entry each time; remembers between `most` and twice as many.
"""

from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """By handle."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._newer: dict[str, V] = {}
        self._older: dict[str, V] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def __contains__(self, handle: str) -> bool:
        return handle in self._newer or handle in self._older

    def __setitem__(self, handle: str, value: V) -> None:
        self._older.pop(handle, None)
        self._newer[handle] = value
        if len(self._newer) >= self._most:
            self._older, self._newer = self._newer, {}

    def get(self, handle: str) -> V | None:
        """None for what is unknown or forgotten."""
        value = self._newer.get(handle)
        return self._older.get(handle) if value is None else value

    def pop(self, handle: str) -> V | None:
        """None for what is unknown or forgotten."""
        value = self._newer.pop(handle, None)
        return self._older.pop(handle, None) if value is None else value
