"""One answer, brought to one form whichever route and stream it came by."""

from __future__ import annotations

from dataclasses import dataclass

IMPORT_HIT = "hit"
ROUTE_SEPARATED = "separated"


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; a chat answer knows no ids, so they are None there."""

    id: int | None
    text: str
    logprob: float | None
    top: tuple[Token, ...] = ()
    """The likeliest tokens of this step, where the request asked for them."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the gateway says it served a request; empty strings from a server that does not say."""

    choice: str = ""
    reason: str = ""
    imported: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got.  `error` is empty for a complete answer."""

    status: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish_reason: str = ""
    generated_tokens: int = 0
    prompt_tokens: int | None = None
    """None where the route does not tell."""
    seed: int | None = None
    route: Route = Route()
    error: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Functions that a chat calls: name, and arguments as the JSON text that came."""

    @property
    def complete(self) -> bool:
        return self.status == 200 and not self.error
