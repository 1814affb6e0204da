"""Put and get inside a model: export the prompt's KV, or import it instead of computing it.

Nothing here raises for a bridge's sake: a failure is counted by reason and becomes a local prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from tgi_patches import kv
from tgi_patches.bridge import Bridge, FirstToken, Record
from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag

from .attention import KVPool

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Imported:
    """A record whose KV is in the pool; its last slot is repaired after the one-token forward."""

    first: FirstToken
    last_slot: list[memoryview]
    """K and V of every layer in the pool."""
    last_kv: list[bytes]
    """What the record holds for them."""

    def repair(self) -> None:
        """A one-row GEMM rounds differently from the prompt's: put the exported values back."""
        for slot, exported in zip(self.last_slot, self.last_kv, strict=True):
            slot[:] = exported


class Relay:
    """A shard's use of the bridge, with its counters."""

    def __init__(
        self,
        bridge: Bridge,
        pool: KVPool,
        *,
        published: Callable[[str], None],
        failed: Callable[[str, MissReason], None],
    ) -> None:
        self._bridge = bridge
        self._bytes = kv.PoolBytes(pool.layers)
        self._published = published
        self._failed = failed
        self.exports: Counter[str] = Counter()
        self.imports: Counter[str] = Counter()

    def put(
        self, tag: PutTag, token_ids: Sequence[int], slots: Sequence[int], first: FirstToken, *, ended: bool
    ) -> None:
        """Publish the KV of the whole prompt (`slots[p]` for position p) and its first token."""
        try:
            planes = self._bytes.planes(kv.runs(slots))
            self._bridge.export(tag.handle, token_ids, first, ended, planes)
        except BridgeMiss as miss:
            self._export_failed(tag.handle, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            self._export_failed(tag.handle, MissReason.ERROR, repr(error))
        else:
            self.exports["ok"] += 1
            self._published(tag.handle)

    def get(self, tag: GetTag, token_ids: Sequence[int], slots: Sequence[int]) -> tuple[Imported | None, str]:
        """Fill `slots` from the record.  (what was imported, `hit`) or (None, why not)."""
        try:
            imported = self._read(tag, token_ids, slots)
        except BridgeMiss as miss:
            reason, detail = miss.reason, str(miss)
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            reason, detail = MissReason.ERROR, repr(error)
        else:
            self.imports["hit"] += 1
            return imported, "hit"
        self.imports[str(reason)] += 1
        log.warning("kv_import_missed", handle=tag.handle, reason=str(reason), detail=detail)
        return None, str(reason)

    def _read(self, tag: GetTag, token_ids: Sequence[int], slots: Sequence[int]) -> Imported:
        record: Record = self._bridge.lookup(tag.shard, tag.epoch, tag.handle)
        if record.token_ids != tuple(token_ids):
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "the two shards tokenized the prompt differently")
        planes = self._bytes.planes(kv.runs(slots))
        self._bridge.read_into(record, planes, len(token_ids))
        last_slot = [run for (run,) in self._bytes.planes([(slots[-1], 1)])]
        return Imported(record.first, last_slot, [bytes(run) for run in last_slot])

    def _export_failed(self, handle: str, reason: MissReason, detail: str) -> None:
        self.exports[str(reason)] += 1
        log.warning("kv_export_failed", handle=handle, reason=str(reason), detail=detail)
        self._failed(handle, reason)
