"""A record is there once every rank has published its part."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tgi_patches.bridge import Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason, ShardSpec
from tgi_patches.sidecar import Sidecar

from .messages import Reported


class Reports:
    """What one rank's relay said of its records since they were last taken."""

    def __init__(self) -> None:
        self._said: list[Reported] = []

    def published(self, handle: str) -> None:
        self._said.append((handle, None))

    def failed(self, handle: str, reason: MissReason) -> None:
        self._said.append((handle, reason))

    def taken(self) -> tuple[Reported, ...]:
        said, self._said = tuple(self._said), []
        return said


class LeadBridge(ArenaBridge):
    """Rank 0's arena.  For the sidecar a record is missing until it is acknowledged."""

    def __init__(
        self,
        spec: ShardSpec,
        epoch: int,
        fingerprint: Fingerprint,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            Path(spec.arena_dir),
            spec.deployment,
            spec.shard,
            0,
            epoch,
            fingerprint,
            arena_bytes=spec.arena_bytes // spec.tensor_parallel,
            record_ttl_s=spec.record_ttl_s,
            pinned_bytes=spec.pinned_bytes // spec.tensor_parallel,
        )
        self._keep_s = spec.record_ttl_s
        self._now = now
        self._complete: OrderedDict[str, float] = OrderedDict()
        """Handles and until when their records may be asked for, oldest first."""

    def acknowledge(self, handle: str) -> None:
        """Every rank has published; on the thread that looks records up."""
        now = self._now()
        while self._complete and next(iter(self._complete.values())) <= now:
            self._complete.popitem(last=False)
        self._complete[handle] = now + self._keep_s
        self._complete.move_to_end(handle)

    def own_lookup(self, handle: str) -> Record:
        """See Bridge.own_lookup; with the `kv_bytes` of all ranks together, which are alike."""
        if handle not in self._complete:
            raise BridgeMiss(MissReason.MISSING, "not every rank has published its part")
        own = super().own_lookup(handle)
        return replace(own, kv_bytes=own.kv_bytes * own.ranks)


class Exports:
    """Tells the sidecar of records, once all ranks have spoken, and counts them by result."""

    def __init__(self, bridge: LeadBridge, sidecar: Sidecar) -> None:
        self._bridge = bridge
        self._sidecar = sidecar
        self.counts: Counter[str] = Counter()

    def settle(self, ranks: Sequence[Sequence[Reported]]) -> None:
        """`ranks` is what each of them reported of one step: the same handles, in the same order."""
        for parts in zip(*ranks, strict=True):
            handle = parts[0][0]
            reason = next((why for _, why in parts if why is not None), None)
            if reason is None:
                self._bridge.acknowledge(handle)
                self.counts[self._where(handle)] += 1
                self._sidecar.published(handle)
            else:
                self.counts[str(reason)] += 1
                self._sidecar.failed(handle, reason)

    def _where(self, handle: str) -> str:
        """What a record counts as: by rank 0's part, as the ranks' arenas are alike."""
        try:
            return "pinned" if self._bridge.own_lookup(handle).place.pinned else "ok"
        except BridgeMiss:
            return "ok"
