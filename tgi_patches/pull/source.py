"""Where a server's records come from: the shard's own arenas, mapped read only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tgi_patches.bridge import Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason


@dataclass(frozen=True, slots=True)
class Offer:
    """A record that may be overwritten at any time."""

    record: Record
    data: memoryview
    """Where it lies, all planes; nothing of it is to be believed before `check`."""
    check: Callable[[], None]
    """Raises BridgeMiss (EPOCH, OVERWRITTEN) once what was read may not be the record any more."""


class Source(Protocol):
    """One shard's records."""

    @property
    def shard(self) -> str:
        """Whose they are."""

    @property
    def digest(self) -> int:
        """Of the shard's fingerprint."""

    def find(self, epoch: int, handle: str, rank: int) -> Offer:
        """Raises BridgeMiss as Bridge.lookup does."""

    def close(self) -> None:
        """Let go of every mapping; `find` maps anew."""


class ArenaSource:
    """The records of `shard` in `directory`, of one epoch and all `ranks`.  Belongs to one thread."""

    def __init__(
        self,
        directory: Path,
        deployment: str,
        shard: str,
        epoch: int,
        fingerprint: Fingerprint,
        ranks: int = 1,
    ) -> None:
        self.shard = shard
        self.digest = int(fingerprint.digest(), 16)
        self._epoch = epoch
        self._ranks = ranks
        self._bridge = ArenaBridge(directory, deployment, shard, 0, 0, fingerprint, 0, 0.0)

    def find(self, epoch: int, handle: str, rank: int) -> Offer:
        """See Source.find."""
        if epoch != self._epoch:
            raise BridgeMiss(MissReason.EPOCH, f"{self.shard} is at {self._epoch}, not {epoch}")
        if rank >= self._ranks:
            raise BridgeMiss(MissReason.RANKS, f"{self.shard} has {self._ranks} ranks")
        bridge = self._bridge
        record = bridge.lookup(self.shard, epoch, handle, rank)
        return Offer(record, bridge.data_of(record), lambda: bridge.check(record))

    def close(self) -> None:
        """See Source.close."""
        self._bridge.close()
