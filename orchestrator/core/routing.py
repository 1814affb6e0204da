"""Which shards serve a request: first come, first served, and nothing promised that is not there.

Pure: conductor, gateways and the fake queue all decide with it.  `reserve` books a grant on the snapshot,
so that a batch of decisions never counts the same room twice.  Reasons are short words for metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from orchestrator.core.link import link
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Choice, Grant, Leg, ShardView, Ticket
from tgi_patches.contract import Fingerprint, Role
from tgi_patches.heads import held

_MIXED_ORDER = (Role.MIXED, Role.DECODE, Role.PREFILL)
_ONE_TOKEN_ORDER = (Role.PREFILL, Role.MIXED, Role.DECODE)
"""A request of one token is all prefill."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What holds for every request at the moment."""

    level: int = 0
    """0 is normal; higher is more degraded."""
    output_cap: int | None = None
    """Most tokens an answer may have now; None for the request's own number."""
    shed_below: int | None = None
    """Requests of a lower priority than this are refused; None refuses none."""
    auto: bool = False
    """The leading conductor chooses the level; otherwise an operator has set it."""
    reason: str = ""
    """Why it is not normal, in a sentence."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a deployment wants of routing."""

    choice: Choice | None = None
    """Split whenever it can be, or never; None asks the cost model."""
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: the request keeps its place in the queue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Never: no shard could hold the request even if it were idle."""

    reason: str
    detail: str
    """One sentence for the client."""


Decision = Grant | Wait | Refuse


class Capacity(NamedTuple):
    """What one shard can be promised at most; the commit script checks the same four numbers."""

    kv_tokens: int
    slots: int
    requests: int
    """Legs of any kind at once: beyond it the server itself answers 429."""
    arena_bytes: int
    """Half of the ring, so that a record is not overwritten before it is read."""


def capacity(view: ShardView) -> Capacity:
    return Capacity(
        kv_tokens=view.kv_tokens,
        slots=view.slots,
        requests=view.limits.max_concurrent_requests,
        arena_bytes=view.ring_bytes // 2,
    )


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class _Request:
    """A ticket's needs under the present mode."""

    ticket: Ticket
    max_new_tokens: int

    def kv_tokens(self, view: ShardView) -> int:
        """Prompt and output in whole blocks of this shard's pool."""
        block = max(view.fingerprint.block_size, 1)
        return -(-(self.ticket.prompt_tokens + self.max_new_tokens) // block) * block

    def record_bytes(self, view: ShardView) -> int:
        return self.ticket.prompt_tokens * view.bytes_per_token


Pair = tuple[ShardView, ShardView]
"""Prefill, decode."""


def decide(ticket: Ticket, shards: Sequence[ShardView], *, mode: Mode | None = None) -> Decision:
    """The shards for `ticket`, from a snapshot with all reservations in it."""
    request = _Request(ticket, capped(ticket.max_new_tokens, mode or Mode()))
    if shards and all(request.kv_tokens(view) > view.kv_tokens for view in shards):
        return _too_large(request, shards)
    ready = [view for view in shards if view.state == ShardState.READY]
    if not ready:
        return Wait("no_shard_ready")
    pairs = _pairs(request, ready)
    if isinstance(pairs, str):
        order = _ONE_TOKEN_ORDER if request.max_new_tokens == 1 else _MIXED_ORDER
        return _mixed(request, ready, order, pairs) or Wait("full")
    return _separated(request, pairs) or _overflow(request, ready, pairs)


def first_come(
    tickets: Iterable[Ticket], shards: Sequence[ShardView], *, mode: Mode | None = None
) -> Iterator[tuple[Ticket, Grant | Refuse]]:
    """Decisions in order, each on what the earlier ones left, up to the first ticket that has to wait.

    Nobody overtakes it: a large request would starve behind small ones.
    """
    for ticket in tickets:
        decision = decide(ticket, shards, mode=mode)
        if isinstance(decision, Wait):
            return
        yield ticket, decision
        if isinstance(decision, Grant):
            shards = reserve(shards, decision)


def capped(max_new_tokens: int, mode: Mode) -> int:
    """Output tokens under the mode's cap; at least one."""
    return max_new_tokens if mode.output_cap is None else max(1, min(max_new_tokens, mode.output_cap))


def reserve(shards: Iterable[ShardView], grant: Grant) -> tuple[ShardView, ...]:
    """The snapshot with `grant` booked on the incarnations it names."""
    return tuple(_book(view, grant, +1) for view in shards)


def release(shards: Iterable[ShardView], grant: Grant) -> tuple[ShardView, ...]:
    """The snapshot with `grant` given back; an incarnation that is gone took its reservations along."""
    return tuple(_book(view, grant, -1) for view in shards)


def _book(view: ShardView, grant: Grant, sign: int) -> ShardView:
    if _is_leg(view, grant.decode):
        view = view.booked(kv_tokens=sign * grant.kv_tokens, slots=sign)
    if grant.prefill is not None and _is_leg(view, grant.prefill):
        view = view.booked(record_bytes=sign * grant.record_bytes, records=sign)
    return view


def _is_leg(view: ShardView, leg: Leg) -> bool:
    return view.shard == leg.shard and view.epoch == leg.epoch


# --- separated ----------------------------------------------------------------------------------


def _pairs(request: _Request, ready: Sequence[ShardView]) -> list[Pair] | str:
    """The pairs that could serve the request when idle, or the word why it is served mixed."""
    if not request.ticket.splittable:
        return "unsplittable"
    if request.max_new_tokens == 1:
        return "one_token"
    decodes = [view for view in ready if view.role is Role.DECODE]
    if not decodes:
        return "no_decode_shard"
    prefills = [view for view in ready if view.role is Role.PREFILL]
    if not prefills:
        return "no_prefill_shard"
    fit: list[Pair] = []
    furthest = (-1, "")
    for prefill in prefills:
        for decode in decodes:
            obstacle = _obstacle(request, prefill, decode)
            if obstacle is None:
                fit.append((prefill, decode))
            elif obstacle[0] > furthest[0]:
                furthest = obstacle
    return fit or furthest[1]


def _obstacle(request: _Request, prefill: ShardView, decode: ShardView) -> tuple[int, str] | None:
    """What keeps a pair from serving the request when idle: how far it came, and the word for it."""
    if not (prefill.hooked and decode.hooked):
        return 0, "unhooked"
    differing = difference(prefill, decode)
    if differing is not None:
        return 1, f"fingerprint_{differing}"
    if link(prefill, decode) is None:
        return 2, "no_link"
    if not _record_fits(request, prefill):
        return 3, "record_too_large"
    if request.kv_tokens(decode) > decode.kv_tokens:
        return 4, "decode_too_small"
    return None


def difference(prefill: ShardView, decode: ShardView) -> str | None:
    """The first field that keeps two shards from sharing KV; None if they may pair."""
    return _difference(prefill.fingerprint, decode.fingerprint)


@lru_cache(maxsize=1024)
def _difference(prefill: Fingerprint, decode: Fingerprint) -> str | None:
    mine, theirs = prefill.content(), decode.content()
    for name, value in mine.items():
        if value != theirs[name]:
            return name
    return None if _splits(prefill) and _splits(decode) else "tensor_parallel"


def _splits(fingerprint: Fingerprint) -> bool:
    """True when every rank has whole heads: its records can then be cut for any other number of ranks."""
    try:
        held(fingerprint.kv_heads, fingerprint.tensor_parallel, 0)
    except ValueError:
        return False
    return True


def _record_fits(request: _Request, prefill: ShardView) -> bool:
    """Of each rank, as its ring and its bytes per token are."""
    size = request.record_bytes(prefill)
    return size <= prefill.record_limit_bytes and size <= capacity(prefill).arena_bytes


def _separated(request: _Request, pairs: Sequence[Pair]) -> Grant | None:
    """The least loaded prefill shard with the least loaded decode shard, among pairs with room."""
    for prefill, decode in sorted(pairs, key=_pair_load) if len(pairs) > 1 else pairs:
        if _has_arena(request, prefill) and _has_room(request, decode):
            return Grant(
                handle=request.ticket.handle,
                choice=Choice.SEPARATED,
                reason="pair",
                decode=_leg(decode),
                prefill=_leg(prefill),
                kv_tokens=request.kv_tokens(decode),
                record_bytes=request.record_bytes(prefill),
                max_new_tokens=request.max_new_tokens,
                pull=link(prefill, decode) or "",
            )
    return None


def _pair_load(pair: Pair) -> tuple[int, int, float, int, bool, str, str]:
    """Where loads are equal, a record that need not travel decides; then names."""
    prefill, decode = pair
    return (*_prefill_load(prefill), *_decode_load(decode), bool(link(*pair)), prefill.shard, decode.shard)


def _overflow(request: _Request, ready: Sequence[ShardView], pairs: Sequence[Pair]) -> Grant | Wait:
    """No pair has room now: a shard launched for mixed work takes it, or it waits."""
    decode_full = not any(_has_room(request, decode) for _, decode in pairs)
    reason = "decode_full" if decode_full else "prefill_full"
    return _mixed(request, ready, (Role.MIXED,), reason) or Wait(reason)


def _has_arena(request: _Request, prefill: ShardView) -> bool:
    limit = capacity(prefill)
    return (
        prefill.outstanding_bytes + request.record_bytes(prefill) <= limit.arena_bytes
        and _legs(prefill) + 1 <= limit.requests
    )


def _prefill_load(view: ShardView) -> tuple[int, int]:
    """Outstanding work in KV bytes, mixed requests included; ties by count."""
    work = view.outstanding_bytes + view.reserved_kv_tokens * view.bytes_per_token
    return work, _legs(view)


# --- mixed --------------------------------------------------------------------------------------


def _mixed(request: _Request, ready: Sequence[ShardView], order: Sequence[Role], reason: str) -> Grant | None:
    """The least loaded shard with room, of the first role in `order` that has one."""
    for role in order:
        with_room = [view for view in ready if view.role is role and _has_room(request, view)]
        if with_room:
            shard = min(with_room, key=lambda view: (*_decode_load(view), view.shard))
            return Grant(
                handle=request.ticket.handle,
                choice=Choice.MIXED,
                reason=reason,
                decode=_leg(shard),
                prefill=None,
                kv_tokens=request.kv_tokens(shard),
                record_bytes=0,
                max_new_tokens=request.max_new_tokens,
            )
    return None


def _has_room(request: _Request, view: ShardView) -> bool:
    limit = capacity(view)
    return (
        view.reserved_kv_tokens + request.kv_tokens(view) <= limit.kv_tokens
        and view.reserved_slots + 1 <= limit.slots
        and _legs(view) + 1 <= limit.requests
    )


def _decode_load(view: ShardView) -> tuple[float, int]:
    """The fuller of pool and slots, as a share; ties by count."""
    kv = view.reserved_kv_tokens / max(view.kv_tokens, 1)
    return max(kv, view.reserved_slots / max(view.slots, 1)), _legs(view)


def _legs(view: ShardView) -> int:
    return view.reserved_slots + view.outstanding_records


def _leg(view: ShardView) -> Leg:
    return Leg(shard=view.shard, epoch=view.epoch, url=view.url, sidecar_url=view.sidecar_url)


def _too_large(request: _Request, shards: Sequence[ShardView]) -> Refuse:
    most = max(view.kv_tokens for view in shards)
    tokens = request.ticket.prompt_tokens + request.max_new_tokens
    return Refuse(
        "too_large",
        f"The request needs {tokens} tokens of KV cache and the largest shard holds {most}.",
    )
