"""TTFT and TPOT of one request, from the times at which its events came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from .answers import Fault, Reader
from .sse import EventStream


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that ended, with what was measured on it."""

    name: str
    kind: str
    """`done`, `refused` or `failed`."""
    started_s: float
    """Since the epoch."""
    total_ms: float
    """From the request's first byte to the answer's last."""
    ttft_ms: float | None = None
    """None unless done, and for an answer without any text."""
    tpot_ms: float | None = None
    """None unless done, and for an answer of one token."""
    tokens: int = 0
    route: str = ""
    """What `x-orchestrator-route` said; empty before other servers."""

    def row(self) -> list[Any]:
        """For the way from a worker process to the master."""
        return list(astuple(self))


def tpot_ms(total_ms: float, ttft_ms: float | None, tokens: int) -> float | None:
    """`(end to end - TTFT) / (n - 1)`; None where that says nothing."""
    return None if ttft_ms is None or tokens < 2 else (total_ms - ttft_ms) / (tokens - 1)


class Reading:
    """An answer while it comes.  Times are seconds since the request was sent."""

    def __init__(self, read: Reader) -> None:
        self.ttft_s: float | None = None
        self.fault: Fault | None = None
        self.whole = False
        self.prompt_tokens: int | None = None
        self._read = read
        self._stream = EventStream()
        self._texts: list[str] = []
        self._counted = 0
        self._told: int | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def tokens(self) -> int:
        """The server's count, else the events that carried a token."""
        return self._counted if self._told is None else self._told

    def take(self, piece: bytes, now_s: float) -> None:
        """Bytes that came at `now_s`.  The first fault is kept; what follows it changes nothing."""
        for data in self._events(piece):
            try:
                event = self._read(data)
            except (ValueError, KeyError, TypeError, IndexError):
                self.fault = Fault(200, "broken_stream", "An event that is not TGI's.")
                return
            if event.fault:
                self.fault = event.fault
                return
            if event.text:
                self._texts.append(event.text)
                if self.ttft_s is None:
                    self.ttft_s = now_s
            self._counted += event.tokens
            self.whole = self.whole or event.last
            self.prompt_tokens = _newest(event.prompt_tokens, self.prompt_tokens)
            self._told = _newest(event.generated_tokens, self._told)

    def _events(self, piece: bytes) -> Iterator[str]:
        if self.fault:
            return
        try:
            yield from self._stream.feed(piece)
        except UnicodeDecodeError:
            self.fault = Fault(200, "broken_stream", "An event that is no UTF-8.")

    def end(self) -> None:
        """The stream ended."""
        if not self.fault and not self.whole:
            self.fault = Fault(200, "cut_off", "The stream ended before the answer did.")


def _newest(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


def outcome(name: str, reading: Reading, started_s: float, total_s: float, route: str) -> Outcome:
    """`total_s`: from sending to the end of the stream."""
    total_ms = 1000 * total_s
    if reading.fault:
        kind = "refused" if reading.fault.refused else "failed"
        return Outcome(name, kind, started_s, total_ms, route=route)
    ttft_ms = None if reading.ttft_s is None else 1000 * reading.ttft_s
    tpot = tpot_ms(total_ms, ttft_ms, reading.tokens)
    return Outcome(name, "done", started_s, total_ms, ttft_ms, tpot, reading.tokens, route)
