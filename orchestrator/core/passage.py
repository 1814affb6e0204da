"""The rest of a leg's event stream on its way to the client, in whole events and mostly unread.  Pure.

Tells a piece that holds nothing but ordinary tokens by counting two byte patterns; such a piece goes
on as it came.  Any other is parsed event by event: ends, errors, comments, other line ends.
"""

from __future__ import annotations

import orjson

from orchestrator.core import redress
from orchestrator.core.redress import Dialect
from orchestrator.core.sse import EVENT_LIMIT_BYTES, BrokenStream, Event, Parser
from tgi_patches.contract import TAG_MARK

_END = b"\n\n"
_MARK = TAG_MARK.encode()


class Passage:
    """`feed` it pieces of any size.  `tag` is what a chat's `model` says, `model` what it has to say."""

    __slots__ = (
        "_dialect",
        "_ends_left",
        "_going_on",
        "_held",
        "_model",
        "_model_json",
        "_parser",
        "_tag",
        "_tag_json",
        "error_data",
        "tokens",
    )

    def __init__(self, dialect: Dialect, *, tag: str = "", model: str = "", ends: int = 1) -> None:
        self.tokens = 0
        """Token events that were passed on."""
        self.error_data: bytes | None = None
        """The data of an error event; nothing after it is passed on."""
        self._dialect = dialect
        self._going_on = redress.going_on(dialect)
        self._ends_left = ends
        self._tag = "" if dialect is Dialect.TGI else tag
        self._model = model
        self._tag_json, self._model_json = orjson.dumps(self._tag), orjson.dumps(model)
        self._held = b""
        self._parser: Parser | None = None

    @property
    def ended(self) -> bool:
        """Every answer of the stream has had its last token."""
        return self._ends_left <= 0

    def ends(self, data: bytes) -> None:
        """An event that the client has already may have been an answer's last.  ValueError as `feed`."""
        self._ends_left -= redress.ends(self._dialect, data)

    def feed(self, piece: bytes) -> bytes:
        """What can be sent now.  ValueError for an event that cannot be read, or that is too large."""
        if self._parser is None and b"\r" in piece:
            # Another way to end lines: the pattern for an event's end does not hold.
            piece, self._held, self._parser = self._held + piece, b"", Parser()
        if self._parser is not None:
            return self._read(self._parser.feed(piece))
        whole = self._whole_events(piece)
        if self._ends_left > 0 and self.error_data is None:
            events = whole.count(_END)
            if events == whole.count(self._going_on):
                restored = whole.replace(self._tag_json, self._model_json) if self._tag else whole
                if not self._tag or _MARK not in restored:
                    self.tokens += events
                    return restored
        return self._read(Parser().feed(whole))

    def finish(self) -> bytes:
        """What the end of the stream completes; an event that was cut off is dropped."""
        return self._read(self._parser.finish()) if self._parser is not None else b""

    def _whole_events(self, piece: bytes) -> bytes:
        """Up to the last end of an event; the rest is held back until it is complete."""
        if self._held:
            piece, self._held = self._held + piece, b""
        end = piece.rfind(_END) + len(_END)
        if end < len(_END):
            end = 0
        if end == len(piece):
            return piece
        self._held = piece[end:]
        if len(self._held) > EVENT_LIMIT_BYTES:
            raise BrokenStream(f"An event of more than {EVENT_LIMIT_BYTES} bytes.")
        return piece[:end]

    def _read(self, events: list[Event]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        """One event as the client gets it; nothing for a comment, and after an error."""
        if event.data is None or self.error_data is not None:
            return b""
        if b'"error"' in event.data and _is_error(event.data):
            self.error_data = event.data
            return b""
        if self._ends_left > 0:
            self.tokens += 1
            self._ends_left -= redress.ends(self._dialect, event.data)
        return redress.relayed(self._dialect, event, self._tag, self._model)


def _is_error(data: bytes) -> bool:
    payload = orjson.loads(data)
    return isinstance(payload, dict) and payload.get("error") is not None
