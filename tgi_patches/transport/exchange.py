"""What travels over a link: an offer by the control path, then a record's planes, then the check.

The giver offers, the taker answers, the bytes go from device to device, and after them a trailer that must be
what was offered.  Only then is a record in the Inventory, where a get leg looks it up by its handle.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

import torch
from torch import Tensor

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import BridgeMiss, ContractError, MissReason, checked_handle
from tgi_patches.transport.link import Link
from tgi_patches.transport.state import Phase

TRAILER_BYTES = 64
_TRAILER = struct.Struct("<8s16s16sQQQ")
_MAGIC = b"tgiokv01"
WAITING_MAX = 16
"""Records that wait for a link; more are refused."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's part of a record, and all that the taker needs besides its bytes."""

    handle: str
    epoch: int
    """The giver's."""
    sequence: int
    """Counts the giver's offers."""
    rank: int
    ranks: int
    tokens: int
    rows: tuple[int, ...]
    """Bytes per token of each plane."""
    tokens_hash: str
    """See `hash_of`."""
    first_id: int
    first_logprob: float
    first_top: tuple[tuple[int, float], ...] = ()
    ended: bool = False
    checksum: int = 0
    """xxh3 of the planes, where both ends are on CPUs or asked for it; 0 for none."""

    def __post_init__(self) -> None:
        checked_handle(self.handle)
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "first_top", tuple((i, p) for i, p in self.first_top))
        if self.tokens < 1 or not self.rows or min(self.rows) < 1:
            raise ContractError(f"an offer of {self.tokens} tokens in {len(self.rows)} planes")

    @property
    def kv_bytes(self) -> int:
        return self.tokens * sum(self.rows)

    @property
    def first(self) -> FirstToken:
        return FirstToken(self.first_id, self.first_logprob, self.first_top)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ContractError."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ContractError(f"an offer that is none: {error}") from None

    def trailer(self) -> bytes:
        """Travels behind the planes."""
        return _TRAILER.pack(
            _MAGIC,
            bytes.fromhex(self.handle),
            bytes.fromhex(self.tokens_hash),
            self.epoch,
            self.sequence,
            self.checksum,
        )


def hash_of(token_ids: Sequence[int]) -> str:
    """Of a record's content ids, see relay.content_ids: 128 bits, hex."""
    packed = array("I", [token_id & 0xFFFFFFFF for token_id in token_ids]).tobytes()
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def packed(planes: Tensor, offer: Offer) -> Tensor:
    """What a giver sends: `planes`, uint8 of `offer.kv_bytes`, with the trailer behind it."""
    if planes.numel() != offer.kv_bytes:
        raise BridgeMiss(MissReason.LAYOUT, f"{planes.numel()} bytes, and {offer.kv_bytes} were offered")
    behind = torch.frombuffer(bytearray(offer.trailer()), dtype=torch.uint8)
    return torch.cat([planes, behind.to(planes.device, non_blocking=True)])


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record on this side's device."""

    offer: Offer
    planes: Tensor
    """uint8, all planes one after another."""


class Inventory:
    """Records by handle and rank: at most `budget_bytes`, each for `ttl_s`; what is promised counts too."""

    def __init__(self, budget_bytes: int, ttl_s: float) -> None:
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._held: dict[tuple[str, int], tuple[Arrived, float]] = {}
        """With the time at which it is dropped."""
        self._promised: dict[tuple[str, int], int] = {}

    @property
    def used_bytes(self) -> int:
        held = sum(arrived.offer.kv_bytes for arrived, _ in self._held.values())
        return held + sum(self._promised.values())

    def promise(self, offer: Offer, now_s: float) -> bool:
        """Keep room for it; False where there is none."""
        self.expire(now_s)
        key = offer.handle, offer.rank
        if key in self._promised or self.used_bytes + offer.kv_bytes > self._budget_bytes:
            return False
        self._promised[key] = offer.kv_bytes
        return True

    def withdraw(self, offer: Offer) -> None:
        self._promised.pop((offer.handle, offer.rank), None)

    def keep(self, arrived: Arrived, now_s: float) -> None:
        """A promised record is there; an earlier one of the same handle is dropped."""
        self.withdraw(arrived.offer)
        self._held[arrived.offer.handle, arrived.offer.rank] = arrived, now_s + self._ttl_s

    def lookup(
        self, handle: str, epoch: int, token_ids: Sequence[int], now_s: float, rank: int = 0
    ) -> Arrived:
        """Raises BridgeMiss: MISSING, EPOCH, TOKENS_DIFFER.  It stays until `release` or its time is over."""
        self.expire(now_s)
        arrived, _ = self._held.get((handle, rank), (None, 0.0))
        if arrived is None:
            raise BridgeMiss(MissReason.MISSING, "nothing of it came over a link")
        if arrived.offer.epoch != epoch:
            raise BridgeMiss(MissReason.EPOCH, f"it came from epoch {arrived.offer.epoch}, not {epoch}")
        if hash_of(token_ids) != arrived.offer.tokens_hash:
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "the record is of another prompt or another adapter")
        return arrived

    def release(self, handle: str) -> None:
        """It was imported, or its request has gone."""
        for key in [key for key in self._held if key[0] == handle]:
            del self._held[key]

    def expire(self, now_s: float) -> None:
        for key in [key for key, (_, until_s) in self._held.items() if now_s >= until_s]:
            del self._held[key]


Say = Callable[[str, str], object]
"""To the other end, by the control path: a word and its text."""


@dataclass(slots=True)
class Giver:
    """The sending end: one record at a time, in order.  `outcome` is told of each: `ok`, or why not."""

    link: Link
    say: Say
    outcome: Callable[[Offer, str], object]
    waiting: deque[tuple[Offer, Tensor]] = field(default_factory=deque)
    current: tuple[Offer, Tensor] | None = None

    def give(self, offer: Offer, payload: Tensor) -> None:
        """Of `packed`.  Raises BridgeMiss: LINK where too many wait, LAYOUT where it is of another size."""
        if payload.numel() != offer.kv_bytes + TRAILER_BYTES:
            raise BridgeMiss(MissReason.LAYOUT, f"{payload.numel()} bytes for {offer.kv_bytes} and a trailer")
        if len(self.waiting) >= WAITING_MAX:
            raise BridgeMiss(MissReason.LINK, f"{WAITING_MAX} records wait for the link")
        self.waiting.append((offer, payload))

    def poll(self, now_s: float) -> None:
        if self.current is None and self.waiting and self.link.offer(now_s):
            self.current = self.waiting.popleft()
            self.say("offer", self.current[0].to_json())

    def answered(self, handle: str, refusal: str, now_s: float) -> None:
        """What the taker said; an answer to anything but the record on offer is of an earlier life."""
        if self.current is None or self.current[0].handle != handle or self.link.phase is not Phase.OFFERED:
            return
        if refusal:
            self.link.refused(now_s)
            self._end(refusal)
        else:
            self.link.send(self.current[1], now_s)

    def moved(self) -> None:
        self._end("ok")

    def lost(self) -> None:
        """The link was aborted: all that waits for it would wait for too long."""
        self._end(str(MissReason.LINK))
        waiting, self.waiting = self.waiting, deque()
        for offer, _ in waiting:
            self.outcome(offer, str(MissReason.LINK))

    def _end(self, result: str) -> None:
        ended, self.current = self.current, None
        if ended is not None:
            self.outcome(ended[0], result)


@dataclass(slots=True)
class Taker:
    """The receiving end.  `rows` are those of this rank's cache, in the giver's number of heads."""

    link: Link
    say: Say
    inventory: Inventory
    rows: tuple[int, ...]
    empty: Callable[[int], Tensor]
    """Device memory, uint8."""
    clock: Callable[[], float]
    counts: Counter[str] = field(default_factory=Counter)
    """By result: `ok`, or a MissReason."""
    current: tuple[Offer, Tensor] | None = None
    early: str = ""
    """An offer that was heard before this end knew that it is connected, or that the last record is here."""

    def offered(self, text: str, now_s: float) -> None:
        """Accept or refuse, and say so."""
        if self.link.phase in (Phase.CONNECTING, Phase.MOVING):
            self.early = text
            return
        try:
            offer = Offer.from_json(text)
        except ContractError:
            self.counts[MissReason.UNSUPPORTED] += 1
            return
        refusal = self._refusal(offer, now_s)
        self.say("answer", f"{offer.handle} {refusal}".rstrip())
        if refusal:
            self.counts[refusal] += 1
            return
        payload = self.empty(offer.kv_bytes + TRAILER_BYTES)
        self.current = offer, payload
        self.link.recv(payload, now_s)

    def poll(self, now_s: float) -> None:
        if self.early and self.link.phase is Phase.READY:
            early, self.early = self.early, ""
            self.offered(early, now_s)

    def moved(self) -> None:
        """All bytes are here: believe them only if what follows them is what was offered."""
        assert self.current is not None
        (offer, payload), self.current = self.current, None
        planes, trailer = payload[: offer.kv_bytes], payload[offer.kv_bytes :]
        reason = _fault(offer, planes, bytes(trailer.cpu().tolist()))
        if reason is None:
            self.inventory.keep(Arrived(offer, planes), self.clock())
            self.counts["ok"] += 1
            self.say("moved", offer.handle)
        else:
            self.inventory.withdraw(offer)
            self.counts[reason] += 1
            self.link.fail(f"what came was not what was offered: {reason}", self.clock())

    def lost(self) -> None:
        """The bytes that were under way may still be written to: their memory is let go, not reused."""
        ended, self.current, self.early = self.current, None, ""
        if ended is not None:
            self.inventory.withdraw(ended[0])
            self.counts[MissReason.LINK] += 1

    def _refusal(self, offer: Offer, now_s: float) -> str:
        """Empty where the record is wanted; then the link is `offered` and there is room."""
        if offer.rows != self.rows:
            return str(MissReason.LAYOUT)
        if not self.link.offer(now_s):
            return str(MissReason.LINK)
        if not self.inventory.promise(offer, now_s):
            self.link.refused(now_s)
            return str(MissReason.OVERWRITTEN)
        return ""


def checksum_of(planes: Tensor) -> int:
    """Of planes on a CPU, for `Offer.checksum`; never 0."""
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(planes.numpy().data) or 1


def _fault(offer: Offer, planes: Tensor, trailer: bytes) -> MissReason | None:
    if trailer != offer.trailer():
        return MissReason.LAYOUT
    if offer.checksum and checksum_of(planes.cpu()) != offer.checksum:
        return MissReason.CHECKSUM
    return None


def words_of(text: str) -> tuple[str, str]:
    """Of an answer: the handle, and why it was refused or nothing."""
    handle, _, refusal = text.partition(" ")
    return handle, refusal
