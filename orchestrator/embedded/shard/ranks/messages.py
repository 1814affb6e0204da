"""What rank 0 asks of its followers, and what they answer.  Travels by `channel`, within one shard."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.embedded.shard.seam import Batch, CachedBatch
from tgi_patches.contract import MissReason, ShardSpec


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: load the model's part of `rank`."""

    spec: ShardSpec
    rank: int
    epoch: int
    threads: int


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other ranks at the file `meeting`."""

    meeting: str


@dataclass(frozen=True, slots=True)
class Warmup:
    """As the seam's; so are the following."""


@dataclass(frozen=True, slots=True)
class Prefill:
    batch: Batch
    cached: CachedBatch | None


@dataclass(frozen=True, slots=True)
class Decode:
    batches: tuple[CachedBatch, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    batch_id: int
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    batch_id: int | None


Command = Start | Join | Warmup | Prefill | Decode | Filter | Clear

Reported = tuple[str, MissReason | None]
"""A record's handle; why it was not exported, or None."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command was carried out.  All but `reported` must be the same on every rank."""

    chosen: tuple[tuple[int, int], ...] = ()
    """(request id, token id) of the step."""
    running: CachedBatch | None = None
    reported: tuple[Reported, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """It raised an error of this kind.  The text may tell of a prompt unless it is `ours`."""

    kind: str
    text: str
    ours: bool = False
    """One of our own sentences."""


Reply = Done | Failed
