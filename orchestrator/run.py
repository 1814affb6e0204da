"""One request on its way: what the client asked, where its answer goes, what is known so far."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.core import request
from orchestrator.core.decision import Mode
from orchestrator.core.estimate import PromptSize
from orchestrator.core.redress import Dialect
from orchestrator.core.request import Event, State
from orchestrator.core.sse import comment, openai_event, tgi_event
from orchestrator.core.ticket import Choice, Grant, Leg, Relayed, SharedRecord
from orchestrator.core.validation import GenerateParameters
from orchestrator.shards.client import IMPORT_HEADER

CAP_HEADER = "x-orchestrator-output-cap"
MODE_HEADER = "x-orchestrator-mode"
DEGRADED_HEADER = "x-orchestrator-degraded"
PREDICTED_HEADER = "x-orchestrator-predicted"


def free(_: int) -> None:
    """Where nobody counts."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Job:
    """A client's request, parsed and typed, not yet validated."""

    route: str
    """For metrics and logs: generate, generate_stream, chat, chat_stream."""
    path: str
    """The shard's route."""
    dialect: Dialect
    stream: bool
    raw: Mapping[str, Any]
    """The body as the client sent it."""
    parameters: GenerateParameters
    size: PromptSize
    splittable: bool
    request_id: str
    inputs: str | None = None
    """The raw prompt; None for a chat."""
    model: str | None = None
    """The name by which a chat calls the model."""
    debug: bool = False
    array: bool = False
    """`POST /` answers with a list of one."""
    choices: int = 1
    """How many answers one stream carries: it has ended when each of them has."""
    key_name: str = ""
    """Of the API key that was shown; empty where none is asked for."""
    priority: int = 0
    """Higher is served first."""
    choice: Choice | None = None
    """How the caller wants it served, where it said so."""
    timeout_s: float | None = None
    """The caller's own, from arrival to the last token; the gateway's holds as well."""
    charge: Callable[[int], None] = free
    """Told the tokens of prompt and answer when the request is over."""


class Out(Protocol):
    """Where the answer goes.  Nothing is sent before `whole` or `start`."""

    started: bool

    async def whole(
        self, body: bytes, headers: Mapping[str, str], passed: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """A complete JSON answer with status 200; `passed` are headers that a shard wrote."""

    async def start(self, headers: Mapping[str, str]) -> None:
        """The head of an event stream, status 200."""

    def push(self, piece: bytes) -> Awaitable[None] | None:
        """Whole events, at once.  Not None where the client is slow: to be awaited before the next."""

    async def send(self, piece: bytes) -> None:
        """Whole events.  Waits while the client is slow."""

    async def finish(self) -> None:
        """The end of a stream."""


@dataclass(slots=True)
class Run:
    """What is known of one request while it is served.  Times are seconds of `clock`."""

    job: Job
    out: Out
    clock: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    """Seconds since the epoch, which all hosts share."""
    handle: str = ""
    """Empty until a ticket is submitted."""
    state: State = State.QUEUED
    granted: Grant | None = None
    max_new_tokens: int = 0
    """Effective: the client's own or what fits, capped by the mode."""
    cap: int | None = None
    """Set when the mode allows less than the client may have."""
    mode: Mode = field(default_factory=Mode)
    """As it was when the request was granted."""
    degraded: bool = False
    """The queue worked with less than it should have, then."""
    seed: int | None = None
    """Minted, for a request that samples without one."""
    model: str = ""
    """The name that a chat's answer carries."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    source: tuple[str, int] | None = None
    """Shard and epoch that the get leg names, where that is a copy of the record."""
    pull_miss: str = ""
    """Why a pull did not bring the record, a MissReason; empty where it did, and where there was none."""
    import_result: str | None = None
    """`hit` or the reason of a miss, when the decode shard said it."""
    arrived_s: float = 0.0
    first_sent_s: float | None = None
    first_token_s: float = 0.0
    """When the first token was here, on the wall clock; 0 before, and where nothing tells."""
    phases_s: dict[str, float] = field(default_factory=dict)
    _phase: str = ""
    _phase_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.arrived_s = self.clock()

    @property
    def grant(self) -> Grant:
        assert self.granted is not None, "a leg needs a grant"
        return self.granted

    @property
    def prefill(self) -> Leg:
        """The prefill shard's part of a separated grant."""
        leg = self.grant.prefill
        assert leg is not None, "a separated grant names a prefill shard"
        return leg

    @property
    def record(self) -> SharedRecord:
        """What the decode shard answers from: an earlier request's record, or this one's own."""
        return self.grant.shared or SharedRecord(self.handle, self.prefill)

    @property
    def imported(self) -> bool | None:
        return None if self.import_result is None else self.import_result == "hit"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_sent_s is None else self.first_sent_s - self.arrived_s

    def step(self, event: Event) -> None:
        self.state = request.step(self.state, event)

    def enter(self, phase: str) -> None:
        """End the phase that runs and begin another; an empty name only ends."""
        now_s = self.clock()
        if self._phase:
            took_s = now_s - self._phase_since_s
            self.phases_s[self._phase] = self.phases_s.get(self._phase, 0.0) + took_s
        self._phase, self._phase_since_s = phase, now_s

    async def send_first(self, piece: bytes) -> None:
        """The head and the first token, and that the answer may be shorter than it was wanted."""
        self.first_token_s = self.wall()
        await self.out.start(self.headers())
        await self.out.send(piece if self.cap is None else piece + comment(self._capped()))
        self.first_sent_s = self.clock()

    def relayed(self) -> Relayed:
        """That the decode shard has read the record, and what its way took."""
        prefill_s, relay_s = self.phases_s.get("prefill", 0.0), self.phases_s.get("relay", 0.0)
        return Relayed(self.handle, self.first_token_s, prefill_s, relay_s, self.prompt_tokens)

    def headers(self) -> dict[str, str]:
        """What every generation tells its client; the unusual only where it is so."""
        told = {
            "x-request-id": self.job.request_id,
            "x-orchestrator-route": str(self.grant.choice),
            "x-orchestrator-reason": self.grant.reason,
        }
        if self.import_result is not None:
            told[IMPORT_HEADER] = self.import_result
        if self.cap is not None:
            told[CAP_HEADER] = str(self.cap)
        if self.mode.level > 0:
            told[MODE_HEADER] = str(self.mode.level)
        if self.degraded:
            told[DEGRADED_HEADER] = "1"
        if self.job.debug and self.grant.predicted:
            told[PREDICTED_HEADER] = self.predicted()
        return told

    def predicted(self) -> str:
        """`separated=0.412 mixed=0.388`: seconds until the last token, as the grant foresaw them."""
        return " ".join(f"{choice}={total_s:.3f}" for choice, total_s in self.grant.predicted.items())

    def _capped(self) -> str:
        reason = " ".join(self.mode.reason.split())  # an operator's: a comment is one line
        return f"orchestrator capped at {self.cap} tokens" + (f": {reason}" if reason else "")

    def timing(self) -> str:
        """The phases as `server-timing` writes them: milliseconds."""
        return ", ".join(f"{name};dur={took_s * 1000:.3f}" for name, took_s in self.phases_s.items())


def encoded(job: Job, payload: Mapping[str, Any]) -> bytes:
    """One event, as the job's route writes it."""
    return tgi_event(payload) if job.dialect is Dialect.TGI else openai_event(payload)
