"""Which KV records other requests with the same prompt can be answered from.

A record is there until so much has been granted on its ring after it that it could be overwritten (a pinned
one cannot), until its time is over, or until somebody did not find it.  Before it is published it is as good
as its owner.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from orchestrator.core.recent import Recent
from orchestrator.core.ticket import Completion, Grant, Leg, Outcome, SharedRecord, Ticket

Prompt = tuple[str, str]
"""Its model and its hash."""


@dataclass(slots=True)
class _Ring:
    """Of one incarnation of a prefill shard, while a record on it may be shared."""

    epoch: int
    written_bytes: int = 0
    written: int = 0
    """Records."""
    owners: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Record:
    prompt: Prompt
    shared: SharedRecord
    ring: _Ring
    most_bytes: int
    """Beyond so many written on the ring it may be overwritten."""
    most_records: int
    expires_s: float
    pinned: bool = False

    def there(self, now_s: float) -> bool:
        ring = self.ring
        kept = ring.written_bytes <= self.most_bytes and ring.written <= self.most_records
        return now_s < self.expires_s and (self.pinned or kept)


class SharedRecords:
    """The newest record of each prompt, a pinned one first; at most `most` of them."""

    def __init__(self, *, most: int, ttl_s: float, ring_share: float, ring_records: int) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._ring_share = ring_share
        self._ring_records = ring_records
        self._records: OrderedDict[Prompt, _Record] = OrderedDict()
        """In the order in which they expire."""
        self._prompts: dict[str, Prompt] = {}
        """By owner."""
        self._unpublished: set[str] = set()
        """Owners."""
        self._rings: dict[str, _Ring] = {}
        self._reads: Recent[str] = Recent(2 * most)
        """Owners by reader."""

    def __len__(self) -> int:
        return len(self._records)

    def find(self, ticket: Ticket, now_s: float) -> SharedRecord | None:
        """The record of an equal prompt, published or on its way; None for the owner itself."""
        record = self._records.get(_prompt(ticket)) if self._records else None
        if record is None or record.shared.handle == ticket.handle:
            return None
        if not record.there(now_s):
            self.forget(record.shared.handle)
            return None
        return record.shared

    def pinned(self, ticket: Ticket, now_s: float) -> bool:
        """Whether another request's record of an equal prompt is there and pinned."""
        return self.find(ticket, now_s) is not None and self._records[_prompt(ticket)].pinned

    def wrote(self, ticket: Ticket, grant: Grant, ring_bytes: int, now_s: float, *, share: bool) -> None:
        """A grant with a prefill: its record goes to that ring, and may be shared."""
        owner = grant.prefill
        assert owner is not None, "a record needs a prefill"
        prompt = _prompt(ticket)
        self.forget(ticket.handle)  # decided again, perhaps elsewhere
        if share and (former := self._records.get(prompt)) is not None:
            if former.pinned and not grant.pinned and former.there(now_s):
                share = False  # the former one lasts longer
            else:
                self.forget(former.shared.handle)
        ring = self._ring(owner, share=share)
        if ring is None:
            return
        ring.written_bytes += grant.record_bytes
        ring.written += 1
        if share:
            most_bytes = ring.written_bytes + int(self._ring_share * ring_bytes)
            shared = SharedRecord(ticket.handle, owner)
            expires_s = now_s + self._ttl_s
            most_records = ring.written + self._ring_records
            self._add(_Record(prompt, shared, ring, most_bytes, most_records, expires_s, grant.pinned))
            self._drop_old(now_s)

    def reads(self, handle: str, owner: str) -> None:
        """A grant that is answered from `owner`'s record."""
        self._reads[handle] = owner

    def withdrawn(self, handle: str) -> None:
        """A grant was not committed after all."""
        self._reads.pop(handle)
        self.forget(handle)

    def published(self, handle: str) -> None:
        """The owner's record was imported."""
        self._unpublished.discard(handle)

    def ended(self, completion: Completion) -> None:
        """An owner without a record, or anybody who did not find one, ends its being shared."""
        handle = completion.handle
        read = self._reads.pop(handle)
        if completion.imported is False:
            self.forget(read or handle)
        elif handle in self._unpublished:
            if completion.outcome is Outcome.DONE:
                self.published(handle)
            else:
                self.forget(handle)

    def forget(self, owner: str) -> None:
        """No more readers for this owner's record; unknown owners are ignored."""
        prompt = self._prompts.pop(owner, None)
        if prompt is None:
            return
        record = self._records.pop(prompt)
        self._unpublished.discard(owner)
        record.ring.owners.discard(owner)
        shard = record.shared.owner.shard
        if not record.ring.owners and self._rings.get(shard) is record.ring:
            del self._rings[shard]

    def lost(self, shard: str, epoch: int) -> None:
        """This incarnation and earlier ones of the shard are gone."""
        ring = self._rings.get(shard)
        if ring is not None and ring.epoch <= epoch:
            for owner in list(ring.owners):
                self.forget(owner)

    def _ring(self, owner: Leg, *, share: bool) -> _Ring | None:
        """Of the owner's incarnation; None where there is nothing to count, or a later one is known."""
        ring = self._rings.get(owner.shard)
        if ring is not None and ring.epoch < owner.epoch:
            self.lost(owner.shard, ring.epoch)
            ring = None
        if ring is None and share:
            ring = self._rings[owner.shard] = _Ring(owner.epoch)
        return ring if ring is not None and ring.epoch == owner.epoch else None

    def _add(self, record: _Record) -> None:
        handle = record.shared.handle
        self._records[record.prompt] = record
        self._prompts[handle] = record.prompt
        self._unpublished.add(handle)
        record.ring.owners.add(handle)

    def _drop_old(self, now_s: float) -> None:
        while self._records:
            oldest = next(iter(self._records.values()))
            if now_s < oldest.expires_s and len(self._records) <= self._most:
                return
            self.forget(oldest.shared.handle)


def _prompt(ticket: Ticket) -> Prompt:
    return ticket.model, ticket.prompt_hash
