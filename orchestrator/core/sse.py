"""Server-sent events: an incremental parser and TGI's two dialects.

TGI's own routes write `data:{json}`, the OpenAI routes `data: {json}` and end with `data: [DONE]`.
The parser keeps each event's bytes as they came, so that a relay need not write them anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b":\n\n"
EVENT_LIMIT_BYTES = 16 * 1024 * 1024

# An empty line ends an event.  The atomic groups keep `\r\n` one line end, never two.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class BrokenStream(ValueError):
    """The bytes are no event stream that we are willing to hold in memory."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event, or a block of comments."""

    raw: bytes
    """The bytes as received, with the empty line that ends them."""
    data: bytes | None
    """The `data` lines joined by a newline; None when there was none."""


class Parser:
    """Feed it bytes in pieces of any size; it returns the events that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completed.  Raises BrokenStream above EVENT_LIMIT_BYTES."""
        self._buffer += piece
        events: list[Event] = []
        start = 0
        while (end := self._next_end(max(start, self._searched))) is not None:
            events.append(_event(bytes(self._buffer[start:end])))
            start = self._searched = end
        del self._buffer[:start]
        # A line end is at most two bytes, an event's end at most four: look at the last three again.
        self._searched = max(0, len(self._buffer) - 3)
        if len(self._buffer) > EVENT_LIMIT_BYTES:
            raise BrokenStream(f"An event of more than {EVENT_LIMIT_BYTES} bytes.")
        return events

    def finish(self) -> list[Event]:
        """What the end of the stream completes: only an event that ended in a lone carriage return.

        Anything else that is left was cut off and is dropped, as the specification says.
        """
        rest = self.rest()
        return [_event(rest)] if rest.endswith(b"\r") and _END.search(rest) else []

    def rest(self) -> bytes:
        """The beginning of an event that is not complete; the parser is empty afterwards."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest

    def _next_end(self, position: int) -> int | None:
        found = _END.search(self._buffer, position)
        if found is None:
            return None
        # A carriage return at the very end may be half of `\r\n`: wait for the next byte.
        if found.end() == len(self._buffer) and self._buffer.endswith(b"\r"):
            return None
        return found.end()


def _event(raw: bytes) -> Event:
    lines: list[bytes] = []
    for line in _LINE_END.split(raw.removeprefix(b"\xef\xbb\xbf")):
        if line == b"data":
            lines.append(b"")
        elif line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return Event(raw, b"\n".join(lines) if lines else None)


def tgi_event(payload: Mapping[str, Any]) -> bytes:
    """One event of `/generate_stream`: `data:{json}` and an empty line."""
    return b"data:" + orjson.dumps(payload) + b"\n\n"


def openai_event(payload: Mapping[str, Any]) -> bytes:
    """One event of the `/v1` routes: `data: {json}` and an empty line."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client ignores; `text` must be one line."""
    return b": " + text.encode() + b"\n\n"
