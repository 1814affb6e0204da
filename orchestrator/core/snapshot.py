"""What a conductor knows at one moment, for `status` and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from orchestrator.core.decision import Mode
from orchestrator.core.roll import Roll
from orchestrator.core.shard import Watched


@dataclass(frozen=True, slots=True)
class Reserved:
    """What is promised on one incarnation of a shard."""

    kv_tokens: int = 0
    slots: int = 0
    record_bytes: int = 0
    records: int = 0


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard, whether it has ever answered or not."""

    shard: str
    role: str
    state: str
    epoch: int
    url: str
    pid: int | None
    failures: int
    """Quick ends in a row."""
    problem: str
    """One sentence, or empty."""
    kv_tokens: int
    slots: int
    running: int
    """Requests that it works on, by its own count."""
    reserved: Reserved
    note: str = ""
    """Why it serves mixed only, or empty."""

    @classmethod
    def of(cls, watched: Watched, reserved: Reserved, *, pid: int | None, problem: str) -> Self:
        status = watched.status
        return cls(
            shard=watched.shard,
            role=str(watched.role),
            state=str(watched.state),
            epoch=watched.epoch,
            url=watched.url,
            pid=pid,
            failures=watched.failures,
            problem=problem,
            kv_tokens=status.kv_tokens if status else 0,
            slots=status.slots if status else 0,
            running=status.running if status else 0,
            reserved=reserved,
            note=status.note if status else "",
        )


@dataclass(frozen=True, slots=True)
class ConductorSnapshot:
    """All that a conductor shows."""

    leader: str
    """Empty while it does not lead."""
    mode: Mode
    waiting_tickets: int
    ended: Mapping[str, int]
    """Requests that ended under this conductor, by outcome."""
    shards: tuple[ShardStatus, ...]
    roll: Roll = field(default_factory=Roll)

    @property
    def reserved(self) -> Reserved:
        """Over all shards."""
        held = [status.reserved for status in self.shards]
        return Reserved(
            kv_tokens=sum(one.kv_tokens for one in held),
            slots=sum(one.slots for one in held),
            record_bytes=sum(one.record_bytes for one in held),
            records=sum(one.records for one in held),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON, with the totals."""
        return {**dataclasses.asdict(self), "reserved": dataclasses.asdict(self.reserved)}
