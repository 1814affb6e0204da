"""Which shards serve a request: the least predicted finish, and nothing promised that is not there.

Pure: conductor, gateways, the fake queue and the simulator all decide with it.  Without a cost model a
request is split whenever it can be, and the least loaded shards take it.  Reasons are words for metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.core.decision import (
    Decision,
    Hint,
    Mode,
    Policy,
    Refuse,
    Request,
    Wait,
    capped,
)
from orchestrator.core.fleet import BY_RANK, OPEN, Fleet, Room, Way
from orchestrator.core.pairing import Pair, pair_for
from orchestrator.core.predict import Prediction, cheaper, mixed_s, separated_s
from orchestrator.core.ticket import Choice, Grant, Leg, ShardView, Ticket
from tgi_patches.contract import Role

_MIXED_ORDER = (Role.MIXED, Role.DECODE, Role.PREFILL)
_ONE_TOKEN_ORDER = (Role.PREFILL, Role.MIXED, Role.DECODE)
"""A request of one token is all prefill."""
_PLAIN_POLICY = Policy()
_PLAIN_HINT = Hint()
_NORMAL = Mode()


def decide(
    ticket: Ticket,
    shards: Sequence[ShardView] | Fleet,
    *,
    mode: Mode | None = None,
    policy: Policy | None = None,
    hint: Hint | None = None,
) -> Decision:
    """The shards for `ticket`, from a snapshot with all reservations in it."""
    fleet = shards if isinstance(shards, Fleet) else Fleet(shards)
    allowed = capped(ticket.max_new_tokens, mode or _NORMAL)
    request = Request(ticket, allowed, policy or _PLAIN_POLICY, hint or _PLAIN_HINT)
    if _too_large(request, fleet):
        return _refusal(request, fleet)
    if not fleet.ready:
        return Wait("no_shard_ready")
    shares = request.hint.shared is not None and request.choice is not Choice.MIXED
    if shares and (grant := _shared(request, fleet)) is not None:
        return grant
    obstacle = _obstacle(request, fleet)
    if obstacle:
        order = _ONE_TOKEN_ORDER if request.max_new_tokens == 1 else _MIXED_ORDER
        return _mixed(request, fleet, order, obstacle) or Wait("full")
    return _either(request, fleet)


def first_come(
    tickets: Iterable[Ticket],
    shards: Sequence[ShardView] | Fleet,
    *,
    mode: Mode | None = None,
    policy: Policy | None = None,
) -> Iterator[tuple[Ticket, Grant | Refuse]]:
    """Decisions in order, each on what the earlier ones left, up to the first ticket that has to wait.

    Nobody overtakes it: a large request would starve behind small ones.
    """
    fleet = shards if isinstance(shards, Fleet) else Fleet(shards)
    for ticket in tickets:
        decision = decide(ticket, fleet, mode=mode, policy=policy)
        if isinstance(decision, Wait):
            return
        yield ticket, decision
        if isinstance(decision, Grant):
            fleet.book(decision)


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


# --- which way ----------------------------------------------------------------------------------


def _obstacle(request: Request, fleet: Fleet) -> str:
    """The word why the request is served mixed whatever the load; empty where a pair could serve it idle."""
    if not request.ticket.splittable:
        return "unsplittable"
    if request.max_new_tokens == 1:
        return "one_token"
    if request.choice is Choice.MIXED:
        return "forced"
    decodes, prefills = fleet.by_role[Role.DECODE], fleet.by_role[Role.PREFILL]
    if not decodes:
        return "no_decode_shard"
    if not prefills:
        return "no_prefill_shard"
    furthest = (-1, "")
    for prefill in prefills:
        for decode, way in zip(decodes, fleet.paths(prefill).ways, strict=True):
            met = _between(request, way, prefill, decode)
            if met[0] == OPEN:
                return ""
            furthest = max(furthest, met, key=lambda each: each[0])
    return furthest[1]


def _between(request: Request, way: Way, prefill: Room, decode: Room) -> Way:
    """The way between two shards, or what keeps them from serving the request when idle."""
    if way[0] != OPEN:
        return way
    if not prefill.fits(request.record_bytes(prefill)):
        return 3, "record_too_large"
    if request.kv_tokens(decode) > decode.limit.kv_tokens:
        return 4, "decode_too_small"
    return way


def _either(request: Request, fleet: Fleet) -> Grant | Wait:
    """A pair, or one shard where the cost model says that splitting does not pay."""
    pair = pair_for(request, fleet)
    # What is hot is split, so that there is a record to share.
    compared = fleet.priced and request.choice is None and request.hint.only is None
    whole = _cheapest_whole(request, fleet) if compared else None
    predictions: dict[str, float] = {}
    if pair is not None and fleet.priced:
        predictions[Choice.SEPARATED.value] = (split := _of_pair(request, pair)).finish_s
        if whole is not None:
            predictions[Choice.MIXED.value] = whole[1].finish_s
            if cheaper(whole[1], split, request.policy.ttft_s, request.policy.tpot_s):
                return _whole_grant(request, whole[0], "break_even", predictions)
    if pair is not None and not pair.obstacle:
        return _split_grant(request, pair, predictions)
    reason = _full_reason(request, fleet) if pair is None else pair.obstacle
    if pair is None or not fleet.priced:
        # A shard launched for mixed work takes what finds no pair with room.
        return _mixed(request, fleet, (Role.MIXED,), reason) or Wait(reason)
    return Wait(reason)


def _full_reason(request: Request, fleet: Fleet) -> str:
    """No decode shard has room: of all, or of those that a hot prompt has to keep to."""
    if request.hint.only is None:
        return "decode_full"
    with_room = any(room.takes(request.kv_tokens(room)) for room in fleet.decodes)
    return "hot_full" if with_room else "decode_full"


# --- separated ----------------------------------------------------------------------------------


def _of_pair(request: Request, pair: Pair) -> Prediction:
    return separated_s(
        pair.prefill,
        pair.decode,
        prompt_tokens=request.ticket.prompt_tokens,
        record_bytes=request.record_bytes(pair.prefill),
        new_tokens=request.new_tokens,
        pull=bool(pair.pull),
        ahead_s=request.hint.ahead_s if pair.obstacle else 0.0,
    )


def _split_grant(request: Request, pair: Pair, predicted: dict[str, float]) -> Grant:
    return Grant(
        handle=request.ticket.handle,
        choice=Choice.SEPARATED,
        reason="pair",
        decode=pair.decode.leg(),
        prefill=pair.prefill.leg(),
        kv_tokens=request.kv_tokens(pair.decode),
        record_bytes=request.record_bytes(pair.prefill),
        max_new_tokens=request.max_new_tokens,
        pull=pair.pull,
        predicted=predicted,
    )


def _shared(request: Request, fleet: Fleet) -> Grant | None:
    """A decode shard that reads the record of an earlier request in place."""
    shared = request.hint.shared
    assert shared is not None, "asked for where there is one"
    owner = fleet.room(shared.owner)
    if owner is None:
        return None
    only = request.hint.only
    found = [
        room
        for room, way in zip(fleet.decodes, fleet.paths(owner).ways, strict=True)
        if way == (OPEN, "")
        and (only is None or room.view.shard in only)
        and room.takes(request.kv_tokens(room))
    ]
    if not found:
        return None
    decode = min(found, key=lambda room: (room.view.shard in request.hint.avoid, room.rank))
    return Grant(
        handle=request.ticket.handle,
        choice=Choice.SEPARATED,
        reason="shared",
        decode=decode.leg(),
        prefill=None,
        kv_tokens=request.kv_tokens(decode),
        record_bytes=0,
        max_new_tokens=request.max_new_tokens,
        shared=shared,
        predicted={"record": owner.queue_s} if owner.costs.prefill is not None else {},
    )


# --- mixed --------------------------------------------------------------------------------------


def _mixed(request: Request, fleet: Fleet, order: Sequence[Role], reason: str) -> Grant | None:
    """The least loaded shard with room, of the first role in `order` that has one."""
    for role in order:
        with_room = [room for room in fleet.by_role[role] if room.takes(request.kv_tokens(room))]
        if with_room:
            return _whole_grant(request, min(with_room, key=_fill), reason, {})
    return None


def _fill(room: Room) -> tuple[float, int, int]:
    """The fuller of pool and slots, as a share; ties by count, then by name."""
    kv = room.kv_tokens / max(room.limit.kv_tokens, 1)
    return max(kv, room.slots / max(room.limit.slots, 1)), room.legs, room.order


def _cheapest_whole(request: Request, fleet: Fleet) -> tuple[Room, Prediction] | None:
    """The shard that would serve the request best by itself, without a prefill shard's help."""
    best: tuple[Room, Prediction] | None = None
    tokens, new = request.ticket.prompt_tokens, request.new_tokens
    only, avoid = request.hint.only, request.hint.avoid
    for role in (Role.MIXED, Role.DECODE):
        rooms = fleet.by_role[role]
        if avoid or only is not None:
            rooms = [
                room
                for room in rooms
                if room.view.shard not in avoid and (only is None or room.view.shard in only)
            ]
        room = _quickest(request, rooms)
        if room is None or room.costs.prefill is None:
            continue
        found = mixed_s(room, prompt_tokens=tokens, new_tokens=new)
        if best is None or found.cost_s < best[1].cost_s:
            best = room, found
    return best


def _quickest(request: Request, rooms: Sequence[Room]) -> Room | None:
    """The least loaded one with room."""
    if not rooms:
        return None
    first = min(rooms, key=BY_RANK)
    if first.takes(request.kv_tokens(first)):
        return first
    with_room = [room for room in rooms if room.takes(request.kv_tokens(room))]
    return min(with_room, key=BY_RANK, default=None)


def _whole_grant(request: Request, room: Room, reason: str, predicted: dict[str, float]) -> Grant:
    return Grant(
        handle=request.ticket.handle,
        choice=Choice.MIXED,
        reason=reason,
        decode=room.leg(),
        prefill=None,
        kv_tokens=request.kv_tokens(room),
        record_bytes=0,
        max_new_tokens=request.max_new_tokens,
        predicted=predicted,
    )


# --- never --------------------------------------------------------------------------------------


def _too_large(request: Request, fleet: Fleet) -> bool:
    """By the roomiest pool: blocks are whole, so each shard is asked only where it is close."""
    tokens = request.ticket.prompt_tokens + request.max_new_tokens
    if tokens + 1024 <= fleet.most_kv_tokens:
        return False
    return bool(fleet.views) and all(_blocks(tokens, view) > view.kv_tokens for view in fleet.views)


def _blocks(tokens: int, view: ShardView) -> int:
    block = max(view.fingerprint.block_size, 1)
    return -(-tokens // block) * block


def _refusal(request: Request, fleet: Fleet) -> Refuse:
    tokens = request.ticket.prompt_tokens + request.max_new_tokens
    return Refuse(
        "too_large",
        f"The request needs {tokens} tokens of KV cache and the largest shard holds {fleet.most_kv_tokens}.",
    )
