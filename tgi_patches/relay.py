"""Put and get inside a model: export the prompt's KV, or import it instead of computing it.

Nothing here raises for a bridge's sake: a failure is counted by reason and becomes a local prefill.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tgi_patches.bridge import Bridge, FirstToken, Planes, Record, Reservation
from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag
from tgi_patches.heads import Share, shares
from tgi_patches.kv import Inbox

T = TypeVar("T")
Reserve = Callable[[Sequence[int]], Reservation]
"""From the bytes of every plane to a place for them; may raise BridgeMiss."""
Done = Callable[[BridgeMiss | None], None]
"""Told once, when a record is published or will not be."""


_UNPINNED = frozenset({MissReason.PINNED_FULL, MissReason.LAYOUT, MissReason.UNSUPPORTED})
"""Why a record cannot be pinned that the ring may still take."""


class Warn(Protocol):
    """Writes one event to the log."""

    def __call__(self, event: str, /, **facts: str) -> object: ...


@dataclass(slots=True)
class Imported:
    """A record whose KV is where the model reads it."""

    inboxes: tuple[Inbox, ...]
    """One per record that a part of it came from."""
    cached_tokens: int
    """Leading tokens of the prompt that need no forward."""
    first: FirstToken | None = None
    """The record's; None for the continuation of a long answer."""

    def repair(self) -> None:
        """After the one-token forward, see Inbox.repair."""
        if self.first is not None:
            for inbox in self.inboxes:
                inbox.repair()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a put leg leaves behind."""

    planes: Planes
    first: FirstToken
    ended: bool
    """The request is complete with its first token."""


@dataclass(frozen=True, slots=True)
class _Miss:
    """Why nothing was imported."""

    reason: MissReason
    detail: str


class Relay:
    """One rank's use of the bridge, with its counters.

    `kv_heads` are the model's, of all `ranks` together.  `agree` gives a number back that every rank gave,
    and 0 where they gave different ones; it is called once for every get, whatever this rank has found.
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        published: Callable[[str], None],
        failed: Callable[[str, MissReason], None],
        warn: Warn,
        kv_heads: int = 1,
        rank: int = 0,
        ranks: int = 1,
        agree: Callable[[int], int] = int,
    ) -> None:
        self._bridge = bridge
        self._kv_heads = kv_heads
        self._rank = rank
        self._ranks = ranks
        self._agree = agree
        self._published = published
        self._failed = failed
        self._warn = warn
        self.exports: Counter[str] = Counter()
        self.imports: Counter[str] = Counter()
        self.imported_tokens = 0
        """Prompt tokens of get legs whose KV came from records."""
        self.recomputed_tokens = 0
        """Those that were left to compute."""
        self._distrusted = ""

    @property
    def keeps(self) -> bool:
        """`keep` has a ring to write to."""
        return self._bridge.ring_bytes > 0

    def distrust(self, why: str) -> None:
        """Export nothing from now on: the cache may hold KV that was never computed."""
        self._distrusted = why

    def put(self, tag: PutTag, token_ids: Sequence[int], outgoing: Callable[[], Outgoing]) -> None:
        """Publish the KV of the whole prompt and its first token: counted as `ok`, or `pinned`."""
        try:
            self._check_trusted()
            out = outgoing()
            what = (tag.handle, content_ids(token_ids, tag.adapter), out.first, out.ended, out.planes)
            _, result = self._placed(tag, lambda pinned: self._bridge.export(*what, pinned=pinned))
        except BridgeMiss as miss:
            self.not_put(tag, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            self.not_put(tag, MissReason.ERROR, repr(error))
        else:
            self._put(tag, result)

    def put_later(
        self,
        tag: PutTag,
        token_ids: Sequence[int],
        first: Callable[[], tuple[FirstToken, bool]],
        start: Callable[[Reserve, Done], None],
    ) -> None:
        """The same where the bytes arrive after this call: `start` fills what it reserves and says when.

        `first`: the first token, and whether the request is complete with it.
        """

        result = "ok"

        def done(miss: BridgeMiss | None) -> None:
            if miss is not None:
                self.not_put(tag, miss.reason, str(miss))
            else:
                self._put(tag, result)

        try:
            self._check_trusted()
            content = content_ids(token_ids, tag.adapter)
            token, ended = first()

            def reserve(plane_bytes: Sequence[int]) -> Reservation:
                nonlocal result
                what = (tag.handle, content, token, ended, plane_bytes)
                reserved, result = self._placed(
                    tag, lambda pinned: self._bridge.reserve(*what, checked=False, pinned=pinned)
                )
                return reserved

            start(reserve, done)
        except BridgeMiss as miss:
            self.not_put(tag, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            self.not_put(tag, MissReason.ERROR, repr(error))

    def not_put(self, tag: PutTag, reason: MissReason, detail: str) -> None:
        """Count an export that did not happen and tell whoever waits for it."""
        self._count_export(tag.handle, reason, detail)
        self._failed(tag.handle, reason)

    def _placed(self, tag: PutTag, place: Callable[[bool], T]) -> tuple[T, str]:
        """`place(pinned)` as the tag asks, or in the ring where it cannot be pinned; what to count it as."""
        if tag.pinned:
            try:
                return place(True), "pinned"
            except BridgeMiss as miss:
                if miss.reason not in _UNPINNED:
                    raise
                self._warn("kv_not_pinned", handle=tag.handle, reason=str(miss.reason), detail=str(miss))
        return place(False), "ok"

    def _put(self, tag: PutTag, result: str) -> None:
        """Count a record that was published and tell whoever waits for it."""
        self.exports[result] += 1
        self._published(tag.handle)

    def _check_trusted(self) -> None:
        if self._distrusted:
            raise BridgeMiss(MissReason.ERROR, self._distrusted)

    def _count_export(self, handle: str, reason: MissReason, detail: str) -> None:
        self.exports[str(reason)] += 1
        self._warn("kv_export_failed", handle=handle, reason=str(reason), detail=detail)

    def keep(self, tag: GetTag, token_ids: Sequence[int], planes: Callable[[], Planes]) -> None:
        """Export what a long answer has reached to this shard's own ring, for `resume`."""
        try:
            self._check_trusted()
            content = content_ids(token_ids, tag.adapter)
            self._bridge.export(tag.handle, content, FirstToken(token_ids[-1], 0.0), False, planes())
        except BridgeMiss as miss:
            self._count_export(tag.handle, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            self._count_export(tag.handle, MissReason.ERROR, repr(error))
        else:
            self.exports["kept"] += 1

    def get(
        self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[Share], Inbox]
    ) -> tuple[Imported | None, str]:
        """Give the record to the model through `inbox`, which is called for each part of it.

        (what was imported, `hit`) or (None, why not), on every rank the same.
        """
        return self._got(tag, token_ids, lambda: self._read(tag, token_ids, inbox), "hit")

    def resume(
        self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[int], Inbox]
    ) -> tuple[Imported | None, str]:
        """The KV that `keep` exported, as far as its tokens are those of this longer prompt.

        `inbox` is called with the number of leading tokens.  (what was imported, `resumed`) or (None, why
        not); the answer goes on with whatever the model chooses.
        """
        return self._got(tag, token_ids, lambda: self._read_kept(tag, token_ids, inbox), "resumed")

    def not_got(self, tag: GetTag, reason: MissReason, detail: str, prompt_tokens: int = 0) -> str:
        """Count an import that did not happen; its reason."""
        self.imports[str(reason)] += 1
        self.recomputed_tokens += prompt_tokens
        self._warn("kv_import_missed", handle=tag.handle, reason=str(reason), detail=detail)
        return str(reason)

    def _got(
        self, tag: GetTag, token_ids: Sequence[int], read: Callable[[], Imported], result: str
    ) -> tuple[Imported | None, str]:
        found: Imported | _Miss
        try:
            found = read()
        except BridgeMiss as miss:
            found = _Miss(miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            found = _Miss(MissReason.ERROR, repr(error))
        # The number, not only that there is one: ranks of other lengths would run other forwards.
        offered = found.cached_tokens + 1 if isinstance(found, Imported) else 0
        if self._agree(offered) != offered and isinstance(found, Imported):
            found = _Miss(MissReason.RANKS, "another rank of this shard has another part, or none")
        if isinstance(found, _Miss):
            return None, self.not_got(tag, found.reason, found.detail, len(token_ids))
        self.imports[result] += 1
        self.imported_tokens += found.cached_tokens
        self.recomputed_tokens += len(token_ids) - found.cached_tokens
        return found, result

    def _read(self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[Share], Inbox]) -> Imported:
        records = self._parts(tag)
        content = content_ids(token_ids, tag.adapter)
        if any(record.token_ids != content for _, record in records):
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "the record is of another prompt or another adapter")
        opened = [(record, inbox(share)) for share, record in records]
        for record, part in opened:
            self._bridge.read_into(record, part.planes, len(token_ids))
        for _, part in opened:
            part.commit()
        first = records[0][1].first
        return Imported(tuple(part for _, part in opened), len(token_ids) - 1, first)

    def _parts(self, tag: GetTag) -> list[tuple[Share, Record]]:
        """The records that together hold this rank's heads; rank 0's tells how many there are."""
        lead = self._bridge.lookup(tag.shard, tag.epoch, tag.handle, 0)
        try:
            needed = shares(self._kv_heads, lead.ranks, self._rank, self._ranks)
        except ValueError as error:
            raise BridgeMiss(MissReason.LAYOUT, str(error)) from None
        return [
            (share, self._bridge.lookup(tag.shard, tag.epoch, tag.handle, share.rank) if share.rank else lead)
            for share in needed
        ]

    def _read_kept(self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[int], Inbox]) -> Imported:
        record = self._bridge.own_lookup(tag.handle)
        content = content_ids(token_ids, tag.adapter)
        cached_tokens = min(common_prefix(record.token_ids, content), len(content) - 1)
        if cached_tokens < 1:
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "the text so far has become other tokens")
        part = inbox(cached_tokens)
        self._bridge.read_into(record, part.planes, cached_tokens)
        part.commit()
        return Imported((part,), cached_tokens)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next(
        (i for i, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs),
        min(len(one), len(other)),
    )


def content_ids(token_ids: Sequence[int], adapter: str) -> tuple[int, ...]:
    """What a record's KV is of: the prompt's tokens, the first one mixed with the adapter's name.

    The same prompt has other keys and values under another adapter.  Ids are 32-bit in a record.
    """
    if not adapter or not token_ids:
        return tuple(token_ids)
    salt = int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=4).digest(), "little")
    return (token_ids[0] ^ salt, *token_ids[1:])
