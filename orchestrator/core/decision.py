"""What a decision is made on besides the shards, and what it can be.

A request as routing sees it, the mode and the policy that hold, and what a scheduler knows beyond the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from orchestrator.core.fleet import Room
from orchestrator.core.ticket import Choice, Grant, SharedRecord, Ticket


@dataclass(frozen=True, slots=True)
class Mode:
    """What holds for every request at the moment."""

    level: int = 0
    """0 is normal; higher is more degraded."""
    output_cap: int | None = None
    """Most tokens an answer may have now; None for the request's own number."""
    shed_below: int | None = None
    """Requests of a lower priority than this are refused; None refuses none."""
    auto: bool = True
    """The leading conductor chooses the level; otherwise an operator has set it."""
    reason: str = ""
    """Why it is not normal, in a sentence."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a deployment wants of routing."""

    choice: Choice | None = None
    """Split whenever it can be, or never; None asks the cost model."""
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: the request keeps its place in the queue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Never: no shard could hold the request even if it were idle."""

    reason: str
    detail: str
    """One sentence for the client."""


Decision = Grant | Wait | Refuse


def always_open(_room: Room, _prompt_tokens: int) -> bool:
    """Where prefill shards take whatever has room."""
    return True


@dataclass(frozen=True, slots=True)
class Hint:
    """What a scheduler knows beyond the shards.  Without one, everything is open and nothing is hot."""

    gate: Callable[[Room, int], bool] = always_open
    """May a prompt of so many tokens be let through to this prefill shard now?"""
    ajar: Collection[str] | None = None
    """Prefill shards whose gate may be open; None for all."""
    shared: SharedRecord | None = None
    """A record of the same prompt."""
    only: Collection[str] | None = None
    """Decode shards that the request has to keep to; None for all."""
    avoid: Collection[str] = ()
    """Decode shards that others need more."""
    holder: str = ""
    """The prefill shard that computed this prompt's beginning before."""
    new_tokens: int = 128
    """How many tokens an answer has, on the average."""
    ahead_s: float = 0.0
    """Prefill of those that wait for the same window before this one."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Request:
    """A ticket's needs under the present mode."""

    ticket: Ticket
    max_new_tokens: int
    policy: Policy
    hint: Hint
    _kv: dict[int, int] = field(default_factory=dict)

    def kv_tokens(self, room: Room) -> int:
        """Prompt and output in whole blocks of this shard's pool."""
        block = room.block
        tokens = self._kv.get(block)
        if tokens is None:
            tokens = -(-(self.ticket.prompt_tokens + self.max_new_tokens) // block) * block
            self._kv[block] = tokens
        return tokens

    def record_bytes(self, room: Room) -> int:
        return self.ticket.prompt_tokens * room.view.bytes_per_token

    @property
    def new_tokens(self) -> int:
        """That the answer will probably have."""
        return min(self.max_new_tokens, self.hint.new_tokens)

    @property
    def choice(self) -> Choice | None:
        return self.ticket.choice or self.policy.choice


def capped(max_new_tokens: int, mode: Mode) -> int:
    """Output tokens under the mode's cap; at least one."""
    return max_new_tokens if mode.output_cap is None else max(1, min(max_new_tokens, mode.output_cap))
