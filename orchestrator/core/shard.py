"""The life of one shard, as one pure function of what is observed.

             Answered            2 x Missed
starting ────────────> ready ──────────────────> suspect
    │                    ^ └──────Drained──┐        │ │
    │                    └─────────Answered┼────────┘ │
    └──Drained─────────────> draining <────┴──Drained─┘   (GivenBack: the same way back)
any ──Exited, or silent for too long──> dead ──Launched──> starting
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.core.ticket import ShardView
from tgi_patches.contract import Role, ShardSpec, StatusReply


class ShardState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    """It missed answers: nothing new is sent to it, what runs there goes on."""
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Rules:
    """When silence counts, in seconds and counts."""

    misses_to_suspect: int = 2
    silent_dead_s: float = 30.0
    """A shard that answered once and then stays silent this long is dead, whatever its process does."""
    start_dead_s: float = 600.0
    """A shard that has not answered this long after its launch is dead."""
    calm_s: float = 60.0
    """A shard that was up this long has left its earlier crashes behind."""
    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0

    def for_observed(self) -> Rules:
        """For a shard that somebody else keeps: it is waited for, however long it is silent."""
        return replace(self, silent_dead_s=math.inf, start_dead_s=math.inf)


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of one shard.  Times are seconds of one steady clock."""

    shard: str
    role: Role
    url: str = ""
    state: ShardState = ShardState.STARTING
    status: StatusReply | None = None
    """Its last answer; None until the first one."""
    misses: int = 0
    """Polls in a row without an answer."""
    launched_s: float = 0.0
    answered_s: float | None = None
    """Last answer of this incarnation; None until the first one."""
    failures: int = 0
    """Ends in a row that followed soon after a launch."""
    dead_epoch: int = 0
    """The incarnation that ended last: a late answer of it revives nothing."""
    sidecar_url: str = ""
    """Where its sidecar answers; empty where that is `url`."""
    pull_host: str = ""
    """Address at which other hosts pull its records; empty for what it says itself, or the host of `url`."""

    @property
    def epoch(self) -> int:
        """The epoch of its last answer; 0 until the first one."""
        return 0 if self.status is None else self.status.epoch

    def view(self) -> ShardView | None:
        """What policies see, without reservations; None until the shard has answered once."""
        if self.status is None:
            return None
        status = self.status
        return ShardView(
            shard=self.shard,
            role=status.role,
            epoch=status.epoch,
            url=self.url,
            state=self.state,
            fingerprint=status.fingerprint,
            limits=status.limits,
            kv_tokens=status.kv_tokens,
            slots=status.slots,
            ring_bytes=status.ring_bytes,
            record_limit_bytes=status.record_limit_bytes,
            bytes_per_token=status.bytes_per_token,
            hooked=status.hooked,
            note=status.note,
            sidecar_url=self.sidecar_url,
            arena_id=status.arena_id,
            pull_host=self.pull_host or status.pull_host,
            pull_port=status.pull_port,
            pulls=status.pulls,
            pinned_bytes=status.pinned_bytes,
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A new incarnation was started and answers at `url`, once it does."""

    url: str
    sidecar_url: str = ""
    pull_host: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A poll brought a status."""

    status: StatusReply


@dataclass(frozen=True, slots=True)
class Missed:
    """A poll brought nothing in time."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing new shall be sent to it."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What was drained may be sent new requests again."""


@dataclass(frozen=True, slots=True)
class Exited:
    """Its process ended."""


Observation = Launched | Answered | Missed | Drained | GivenBack | Exited


def observe(watched: Watched, observation: Observation, now_s: float, rules: Rules | None = None) -> Watched:
    """What is known after `observation`.  An answer of another shard (a reused port) counts as none."""
    rules = rules or Rules()
    match observation:
        case Launched(url, sidecar_url, pull_host):
            return replace(
                watched,
                url=url,
                sidecar_url=sidecar_url,
                pull_host=pull_host,
                state=ShardState.STARTING,
                misses=0,
                launched_s=now_s,
                answered_s=None,
            )
        case Exited():
            return _dead(watched, now_s, rules)
        case Drained():
            return (
                watched if watched.state is ShardState.DEAD else replace(watched, state=ShardState.DRAINING)
            )
        case GivenBack():
            return _given_back(watched)
        case Answered(status) if status.shard == watched.shard:
            return _answered(watched, status, now_s)
        case Answered() | Missed():
            return _missed(watched, now_s, rules)


def stranger(status: StatusReply, spec: ShardSpec) -> str:
    """In words, what answers in place of the shard of `spec`; empty where it is that one."""
    told = (status.deployment, status.shard, status.role, status.fingerprint.model)
    wanted = (spec.deployment, spec.shard, spec.role, spec.model_name)
    for what, theirs, ours in zip(("deployment", "shard", "role", "model"), told, wanted, strict=True):
        if theirs != ours:
            return f"{what} {str(theirs)!r} answers in place of {str(ours)!r}"
    return ""


def backoff_s(failures: int, rules: Rules | None = None) -> float:
    """Seconds to wait before the launch that follows `failures` (>= 1) quick ends: 0.5, 1, 2 ... 30."""
    rules = rules or Rules()
    doublings = min(max(failures, 1) - 1, 32)
    return float(min(rules.backoff_first_s * 2**doublings, rules.backoff_most_s))


def _answered(watched: Watched, status: StatusReply, now_s: float) -> Watched:
    if watched.state is ShardState.DEAD or status.epoch == watched.dead_epoch:
        return watched
    draining = watched.state is ShardState.DRAINING
    return replace(
        watched,
        state=ShardState.DRAINING if draining else ShardState.READY,
        status=status,
        misses=0,
        answered_s=now_s,
    )


def _given_back(watched: Watched) -> Watched:
    """Ready with its next answer, or at once where it has answered lately."""
    if watched.state is not ShardState.DRAINING:
        return watched
    if watched.answered_s is None:
        return replace(watched, state=ShardState.STARTING)
    return replace(watched, state=ShardState.SUSPECT if watched.misses else ShardState.READY)


def _missed(watched: Watched, now_s: float, rules: Rules) -> Watched:
    if watched.state is ShardState.DEAD:
        return watched
    misses = watched.misses + 1
    if watched.answered_s is None:
        silent = now_s - watched.launched_s >= rules.start_dead_s
    else:
        silent = now_s - watched.answered_s >= rules.silent_dead_s
    if silent:
        return _dead(replace(watched, misses=misses), now_s, rules)
    suspect = watched.state is ShardState.READY and misses >= rules.misses_to_suspect
    return replace(watched, misses=misses, state=ShardState.SUSPECT if suspect else watched.state)


def _dead(watched: Watched, now_s: float, rules: Rules) -> Watched:
    """Idempotent: a shard dies once per launch, so a silent one that then exits counts one failure."""
    if watched.state is ShardState.DEAD:
        return watched
    calm = watched.answered_s is not None and now_s - watched.launched_s >= rules.calm_s
    return replace(
        watched,
        state=ShardState.DEAD,
        failures=1 if calm else watched.failures + 1,
        dead_epoch=watched.epoch or watched.dead_epoch,
    )
