"""How a prompt's KV travels from the shard that prefilled it to the shard that decodes.

The Protocol and the facts both sides exchange.  Bytes only: nothing here knows tensors.
`arena.py` is the bridge of one host, `memory.py` the fake with the same semantics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

Planes = Sequence[Sequence[memoryview]]
"""One entry per [layer][k|v] in order, each a list of uint8 runs in token order.

A run is a stretch of consecutive slots of the paged pool; every plane holds the same tokens.
"""


class ArenaError(Exception):
    """An arena cannot be opened as asked; the text is one sentence for a user."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What prefill sampled: the token, its logprob and at most 5 (id, logprob) of the top-n list."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies; only the bridge that made it understands the numbers."""

    slot: int
    """Of the index."""
    position: int
    """Virtual offset in the owner's ring, or offset in its pinned region."""
    pinned: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One published record: plain values, so it stays readable after the bytes were overwritten."""

    handle: str
    shard: str
    epoch: int
    sequence: int
    """Counts the exports of one epoch from 1."""
    token_ids: tuple[int, ...]
    first: FirstToken
    ended: bool
    kv_bytes: int
    place: Place = field(repr=False)
    rows: tuple[int, ...] = field(repr=False)
    """Bytes per token of each plane."""
    checksums: tuple[int, ...] = field(repr=False)
    """xxh3_64 of each 256 KiB of each plane, in order; empty where the writer made none."""
    rank: int = 0
    """Whose arena it is in."""
    ranks: int = 1
    """Tensor parallelism of the shard that computed it: the prompt has so many records."""


class Reservation(Protocol):
    """A record's place in the ring, to be filled by somebody else: a socket, or a GPU's copy engine."""

    @property
    def data(self) -> memoryview:
        """Writable, all planes one after another; garbage until published."""

    @property
    def valid(self) -> bool:
        """False once the ring has gone past it, or it was closed: write nothing more."""

    def publish(self, checksums: Sequence[int] = ()) -> Record:
        """The bytes are complete; `checksums` as Record's, and none where it was reserved unchecked.

        Readers of an unchecked record trust sequence and token ids alone.  Raises BridgeMiss:
        OVERWRITTEN (the ring has gone past it), LAYOUT (another number of checksums).
        """

    def abandon(self) -> None:
        """Nothing will come."""


class Bridge(Protocol):
    """Few verbs; a record that cannot be used raises BridgeMiss(reason), never anything else."""

    @property
    def ring_bytes(self) -> int:
        """Size of the own ring; 0 for a shard that only reads."""

    @property
    def record_limit_bytes(self) -> int:
        """The largest `kv_bytes` that can be exported: a quarter of the ring."""

    @property
    def pinned_bytes(self) -> int:
        """Size of the own pinned region, which no ring record ever touches; 0 for none."""

    @property
    def pinned_free_bytes(self) -> int:
        """Bytes of the pinned region that no record holds, expired or not; perhaps in several pieces."""

    def export(
        self,
        handle: str,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        planes: Planes,
        *,
        pinned: bool = False,
    ) -> Record:
        """Copy all planes into the own ring and publish; a handle exported twice: the later counts.

        A `pinned` record stays for its time to live, unless `release`, a later export of its handle or
        a new epoch ends it before: the ring does not overwrite it.

        Raises BridgeMiss: LAYOUT (over the limit, or planes of unequal token counts), UNSUPPORTED
        (no ring, no pinned region), PINNED_FULL (no room: nothing has changed, export it unpinned).
        """

    def reserve(
        self,
        handle: str,
        token_ids: Sequence[int],
        first: FirstToken,
        ended: bool,
        plane_bytes: Sequence[int],
        *,
        ranks: int | None = None,
        checked: bool = True,
        pinned: bool = False,
    ) -> Reservation:
        """Room in the own ring for planes of these sizes; several may be open at a time.

        `ranks` is Record.ranks where it is not this shard's own; `checked`, whether checksums will come.
        A `pinned` one has a place that nobody takes: it has to be published or abandoned.
        Raises BridgeMiss as `export` does.
        """

    def release(self, handle: str) -> bool:
        """Give a pinned record's place back; False where none of this handle is pinned here."""

    def lookup(self, shard: str, epoch: int, handle: str, rank: int | None = None) -> Record:
        """The record of another (or this) shard's rank; of the same rank as this bridge's for None.

        Raises BridgeMiss: EPOCH (the shard restarted), FINGERPRINT, MISSING (never there, expired),
        OVERWRITTEN, CHECKSUM (its description is damaged), LAYOUT (another arena version), ERROR.
        """

    def own_lookup(self, handle: str) -> Record:
        """The same for this shard's own ring and epoch; safe from another thread than export's."""

    def read_into(self, record: Record, planes: Planes, tokens: int) -> None:
        """Copy the first `tokens` tokens of every plane into writable runs, verified on return.

        Raises BridgeMiss: EPOCH, OVERWRITTEN, CHECKSUM, LAYOUT; the runs then hold garbage.
        """

    def close(self) -> None:
        """Let go of every mapping; published records stay readable for others until they expire."""
