"""The mailboxes of all ranks of a shard as one: what its sidecar hears when a record is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi_patches.contract import BridgeMiss, MissReason, ShardSpec
from tgi_patches.mailbox import MailboxReader, mailbox_path
from tgi_patches.sidecar.core import OwnRecords, Sidecar


@contextmanager
def listening(spec: ShardSpec, sidecar: Sidecar, records: OwnRecords) -> Iterator[None]:
    """Every letter of every rank reaches `sidecar`.  Raises OSError where a mailbox cannot be opened."""
    every_rank = EveryRank(sidecar, records, spec.tensor_parallel)
    readers: list[MailboxReader] = []
    try:
        for rank in range(spec.tensor_parallel):
            path = mailbox_path(Path(spec.arena_dir), spec.deployment, spec.shard, rank)
            reader = MailboxReader(path, published=every_rank.published, failed=sidecar.failed)
            reader.open()
            readers.append(reader)
        yield
    finally:
        for reader in readers:
            reader.close()


class EveryRank:
    """Wakes waiters once every rank has published.

    It looks into the arenas instead of counting letters: a sidecar that has just started again has missed
    some, and the letter that comes last finds the record complete all the same.
    """

    def __init__(self, sidecar: Sidecar, records: OwnRecords, ranks: int) -> None:
        self._sidecar = sidecar
        self._records = records
        self._ranks = ranks

    def published(self, handle: str) -> None:
        """One rank has published its part."""
        if self._ranks == 1 or not self._incomplete(handle):
            self._sidecar.published(handle)

    def _incomplete(self, handle: str) -> bool:
        try:
            self._records.own_lookup(handle)
        except BridgeMiss as miss:
            return miss.reason == MissReason.MISSING
        return False
