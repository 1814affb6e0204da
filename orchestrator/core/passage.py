"""The rest of a leg's event stream on its way to the client, in whole events and mostly unread.  Pure.

Tells a piece that holds nothing but ordinary tokens by counting two byte patterns; such a piece goes
on as it came.  Any other is parsed event by event: ends, errors, comments, other line ends.
"""

from __future__ import annotations

import orjson

from orchestrator.core import redress
from orchestrator.core.redress import Dialect
from orchestrator.core.sse import BrokenStream, Event, Parser
from tgi_patches.contract import TAG_MARK

_END = b"\n\n"
_DONE = b"[DONE]"
_CR = ord("\r")
"""As a number: `in` tries that first, and bytes cost it an exception."""
_MARK = TAG_MARK.encode()
LARGE_EVENT_BYTES = 64 * 1024
"""Above it an event that arrives in pieces is no longer searched from its beginning each time."""


class Passage:
    """`feed` it pieces of any size.  `tag` is what a chat's `model` says, `model` what it has to say.

    With several `ends` an event must speak of one answer at most, as TGI's do.
    """

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
        "failure",
        "over",
        "tokens",
    )

    def __init__(self, dialect: Dialect, *, tag: str = "", model: str = "", ends: int = 1) -> None:
        self.tokens = 0
        """Token events that were passed on."""
        self.error_data: bytes | None = None
        """The data of an error event; nothing after it is passed on."""
        self.failure: ValueError | None = None
        """Why an event could not be read, or was too large; it and what follows is not passed on."""
        self.over = False
        """One of the two is there."""
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
        """What can be sent now.  Afterwards `over` may say that this was all."""
        if self._parser is not None or _CR in piece or self.over:
            return self._parsed(piece)
        whole = piece if piece.endswith(_END) and not self._held else self._whole_events(piece)
        if self._ends_left > 0:
            # No event has fewer than two line ends, nor the pattern more than once: if the counts agree,
            # each has one line, and the pattern.
            events = whole.count(self._going_on)
            if 2 * events == whole.count(b"\n"):
                restored = whole.replace(self._tag_json, self._model_json) if self._tag else whole
                if not self._tag or restored.find(_MARK) < 0:
                    self.tokens += events
                    return restored
        return self._read(Parser().feed(whole))

    def finish(self) -> bytes:
        """What the end of the stream completes; an event that was cut off is dropped."""
        return b"" if self._parser is None or self.over else self._read(self._parser.finish())

    def _parsed(self, piece: bytes) -> bytes:
        """Of a stream whose lines end in another way, or one of whose events is large."""
        if self.over:
            return b""
        if self._parser is None:
            piece, self._held, self._parser = self._held + piece, b"", Parser()
        try:
            return self._read(self._parser.feed(piece))
        except BrokenStream as error:
            self._fail(error)
            return b""

    def _whole_events(self, piece: bytes) -> bytes:
        """Up to the last end of an event; the rest is held back until it is complete."""
        if self._held:
            piece, self._held = self._held + piece, b""
        at = piece.rfind(_END)
        whole, self._held = (piece[: at + len(_END)], piece[at + len(_END) :]) if at >= 0 else (b"", piece)
        if len(self._held) > LARGE_EVENT_BYTES:
            self._parsed(b"")
        return whole

    def _read(self, events: list[Event]) -> bytes:
        sent: list[bytes] = []
        for event in events:
            try:
                sent.append(self._event(event))
            except ValueError as error:
                self._fail(error)
                break
            except (AttributeError, TypeError):
                self._fail(BrokenStream("An event's JSON has another shape."))
                break
        return b"".join(sent)

    def _fail(self, failure: ValueError) -> None:
        self.failure = failure
        self.over = True

    def _event(self, event: Event) -> bytes:
        """One event as the client gets it; nothing for a comment, and after an error."""
        if event.data is None or self.error_data is not None:
            return b""
        if b'"error"' in event.data and _is_error(event.data):
            self.error_data = event.data
            self.over = True
            return b""
        sent = redress.relayed(self._dialect, event, self._tag, self._model)
        if event.data == _DONE:
            # TGI ends a tool call without saying why.
            self._ends_left = 0
        elif self._ends_left > 0:
            self._ends_left -= redress.ends(self._dialect, event.data)
            self.tokens += 1
        return sent


def _is_error(data: bytes) -> bool:
    payload = orjson.loads(data)
    return isinstance(payload, dict) and payload.get("error") is not None
