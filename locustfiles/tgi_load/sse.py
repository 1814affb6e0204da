"""Server-sent events, read in pieces of any size."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStream:
    """Feed it bytes as they come; it returns the `data` of each event that they completed.

    Comments, other fields and events without data are dropped.  A character that was cut between two
    pieces comes out whole, because only whole lines are decoded.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Raises UnicodeDecodeError when an event is no UTF-8."""
        pending = self._rest + piece
        # A carriage return at the end may be half of `\r\n`.
        held = pending[-1:] if pending.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(pending[: len(pending) - len(held)])
        self._rest = rest + held
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data.clear()
        return event.decode("utf-8")
