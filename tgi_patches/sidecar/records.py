"""A shard's own records, seen from outside the processes that write them: the arenas of all its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tgi_patches.bridge import Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason, ShardSpec


class Records:
    """Reads only; maps an arena when it is first asked for.  Belongs to one thread.

    `fingerprint` gives None until the shard's server has finished its warmup; nothing is there before.
    """

    def __init__(self, spec: ShardSpec, epoch: int, fingerprint: Callable[[], Fingerprint | None]) -> None:
        self._spec = spec
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._bridge: ArenaBridge | None = None

    def own_lookup(self, handle: str) -> Record:
        """Rank 0's record with the `kv_bytes` of all ranks, once every rank has published its part.

        Raises BridgeMiss as Bridge.lookup does, and TOKENS_DIFFER where the parts are of two prompts.
        """
        bridge, spec = self._opened(), self._spec
        parts = [bridge.lookup(spec.shard, self._epoch, handle, rank) for rank in range(spec.tensor_parallel)]
        first = parts[0]
        if first.ranks != spec.tensor_parallel:
            raise BridgeMiss(MissReason.LAYOUT, f"{first.ranks} ranks, not {spec.tensor_parallel}")
        if any((part.token_ids, part.first.id) != (first.token_ids, first.first.id) for part in parts):
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "between the ranks")
        return replace(first, kv_bytes=sum(part.kv_bytes for part in parts))

    def close(self) -> None:
        """Unmap; a later lookup maps again."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None

    def _opened(self) -> ArenaBridge:
        if self._bridge is None:
            fingerprint = self._fingerprint()
            if fingerprint is None:
                raise BridgeMiss(MissReason.MISSING, "the server has not finished its warmup")
            self._bridge = _reader(self._spec, self._epoch, fingerprint)
        return self._bridge


def _reader(spec: ShardSpec, epoch: int, fingerprint: Fingerprint) -> ArenaBridge:
    return ArenaBridge(
        Path(spec.arena_dir),
        spec.deployment,
        spec.shard,
        0,
        epoch,
        fingerprint,
        arena_bytes=0,
        record_ttl_s=spec.record_ttl_s,
    )
