"""What travels through the queue: a ticket asks, a grant answers, a completion ends it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from orchestrator.core.cost import Costs
from tgi_patches.contract import Fingerprint, Limits, Role

EMBEDDED = "embedded"
"""What an embedded shard's fingerprint has in place of one of TGI's attention implementations."""


class Choice(StrEnum):
    """How a request is served."""

    SEPARATED = "separated"
    MIXED = "mixed"


class Outcome(StrEnum):
    """How a request ended; the terminal states of `core.request`."""

    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Ticket:
    """One request that asks for shards.  Times are wall-clock seconds (shared between hosts)."""

    handle: str
    gateway: str
    """Grant stream to answer on: `<gateway id>.<gateway epoch>`."""
    prompt_tokens: int
    """Estimate, never below the truth by more than the estimator's margin."""
    max_new_tokens: int
    created_s: float
    deadline_s: float
    splittable: bool = True
    """False for what is served mixed, never split."""
    priority: int = 0
    model: str = ""
    prompt_hash: str = ""
    """Equal for prompts that become the same tokens under the same adapter: they may share a record."""
    simhash: int = 0
    """64 bits, few of which differ between prompts that are nearly the same (core.fingerprint); 0: none."""
    prefix: int = 0
    """Equal for prompts that begin with the same text; 0 for those too short to matter."""
    choice: Choice | None = None
    """The client's own wish, where it has one."""


class Capacity(NamedTuple):
    """What one shard can be promised at most; the commit script checks the same four numbers."""

    kv_tokens: int
    slots: int
    requests: int
    """Legs of any kind at once: beyond it the server itself answers 429."""
    arena_bytes: int
    """Half of the ring, so that a record is not overwritten before it is read."""


Facts = tuple[Fingerprint, bool, str, str, str, int, bool]


@dataclass(frozen=True)  # no slots: `booked` copies the dictionary
class ShardView:
    """What a policy knows of one shard: a snapshot, reservations included."""

    shard: str
    role: Role
    epoch: int
    url: str
    state: str
    """`starting`, `ready`, `suspect`, `draining` or `dead` (core.shard)."""
    fingerprint: Fingerprint
    limits: Limits
    kv_tokens: int
    slots: int
    ring_bytes: int
    record_limit_bytes: int
    bytes_per_token: int
    reserved_kv_tokens: int = 0
    reserved_slots: int = 0
    outstanding_bytes: int = 0
    """Bytes of granted records that are not completed; stays under half the ring."""
    outstanding_records: int = 0
    hooked: bool = True
    """False: TGI's server runs without the overlay's hooks and serves mixed only."""
    note: str = ""
    """Where not hooked, the reason in a sentence."""
    sidecar_url: str = ""
    """Where its sidecar answers; empty where that is `url`."""
    arena_id: str = ""
    """Of the folder that its arenas are in; empty for a shard that does not tell."""
    pull_host: str = ""
    """Address at which other hosts pull its records; empty for the host of `url`."""
    pull_port: int = 0
    """0: it offers none."""
    pulls: bool = False
    """It can fetch records from other hosts."""
    costs: Costs | None = None
    """What its phases take, as far as that was measured."""
    batch_requests: float = 0.0
    """Prompts of one prefill batch, lately and on the average, as measured; 0 before the first."""
    batch_tokens: float = 0.0
    """Their tokens."""
    hot_groups: int = 0
    """Groups of hot prompts that keep to it."""
    pinned_bytes: int = 0
    """Room for records that later ones do not overwrite; 0: it pins none."""

    def booked(
        self, *, kv_tokens: int = 0, slots: int = 0, record_bytes: int = 0, records: int = 0
    ) -> ShardView:
        """The same shard with so much more promised: `replace` at a twentieth of its cost."""
        view = object.__new__(ShardView)
        known = view.__dict__
        known.update(self.__dict__)
        known["reserved_kv_tokens"] += kv_tokens
        known["reserved_slots"] += slots
        known["outstanding_bytes"] += record_bytes
        known["outstanding_records"] += records
        return view

    @cached_property
    def facts(self) -> Facts:
        """All that a way for records to or from it depends on; kept by `booked`."""
        return (
            self.fingerprint,
            self.hooked,
            self.url,
            self.arena_id,
            self.pull_host,
            self.pull_port,
            self.pulls,
        )

    @cached_property
    def capacity(self) -> Capacity:
        """Kept by `booked`."""
        return Capacity(
            kv_tokens=self.kv_tokens,
            slots=self.slots,
            requests=self.limits.max_concurrent_requests,
            arena_bytes=self.ring_bytes // 2,
        )

    @property
    def engine(self) -> str:
        """`embedded`, or `TGI` for a shard that drives TGI's server."""
        return EMBEDDED if self.fingerprint.attention == EMBEDDED else "TGI"


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Leg:
    """One shard's part of a grant."""

    shard: str
    epoch: int
    url: str
    sidecar_url: str = ""
    """Where its sidecar answers; empty where that is `url`."""

    @property
    def control_url(self) -> str:
        """Of `status`, `wait` and `pull`."""
        return self.sidecar_url or self.url


@dataclass(frozen=True, slots=True)
class SharedRecord:
    """Another request's record of the same prompt, and the shard that has it or is computing it."""

    handle: str
    owner: Leg


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Grant:
    """Shards for one request, with what was reserved for it."""

    handle: str
    choice: Choice
    reason: str
    decode: Leg
    """The shard that answers (also for mixed)."""
    prefill: Leg | None
    """None for mixed."""
    kv_tokens: int
    """Reserved on `decode`."""
    record_bytes: int
    """Reserved on `prefill`'s ring; 0 for mixed."""
    max_new_tokens: int
    """The request's own, capped by the mode."""
    pull: str = ""
    """`host:port` from which `decode` has to fetch the record first; empty where it reads it in place."""
    shared: SharedRecord | None = None
    """Set where `decode` answers from the record of an earlier request: there is no prefill then."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds until the last token by choice, as far as the cost model knows: why this one was chosen."""
    pinned: bool = False
    """`prefill` is to keep the record for its time to live, whatever comes after it on its ring."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Completion:
    """How a request ended and how long each phase took, in seconds by phase name."""

    handle: str
    outcome: Outcome
    phases_s: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    imported: bool | None = None
    """True when decode used the record, False for a local prefill, None for mixed."""
    first_token_s: float = 0.0
    """Wall-clock time of the first token at the gateway; 0 where there was none."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A request's record is where its decode shard needs it: the prefill shard has no more to do for it."""

    handle: str
    first_token_s: float = 0.0
    """Wall-clock time of the first token at the gateway; 0 where it is not known."""
    prefill_s: float = 0.0
    """From the put leg's start to its first token."""
    relay_s: float = 0.0
    """From there until the record could be read."""
    prompt_tokens: int = 0


def relayed(grant: Grant) -> Grant:
    """What is still held once the record has been imported."""
    return replace(grant, prefill=None, record_bytes=0, pull="")
