"""Which shards serve a request: the least predicted finish, and nothing promised that is not there.

Pure: conductor, gateways, the fake queue and the simulator all decide with it.  Without a cost model a
request is split whenever it can be, and the least loaded shards take it.  Reasons are words for metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator.core.fleet import BY_RANK, OPEN, Capacity, Fleet, Room, Way, capacity
from orchestrator.core.predict import Prediction, cheaper, mixed_s, separated_s
from orchestrator.core.ticket import EMBEDDED, Choice, Grant, Leg, ShardView, SharedRecord, Ticket
from tgi_patches.contract import Role

__all__ = [
    "Capacity",
    "Decision",
    "Hint",
    "Mode",
    "Policy",
    "Refuse",
    "Wait",
    "capacity",
    "decide",
    "first_come",
    "release",
    "reserve",
]

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
    auto: bool = True
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


def always_open(_room: Room, _prompt_tokens: int) -> bool:
    """Where prefill shards take whatever has room."""
    return True


@dataclass(frozen=True, slots=True)
class Hint:
    """What a scheduler knows beyond the shards.  Without one, everything is open and nothing is hot."""

    gate: Callable[[Room, int], bool] = always_open
    """May a prompt of so many tokens be let through to this prefill shard now?"""
    ajar: Collection[str] | None = None
    """Prefill shards whose gate may be open; None for all."""
    shared: SharedRecord | None = None
    """A record of the same prompt."""
    only: Collection[str] | None = None
    """Decode shards that the request has to keep to; None for all."""
    avoid: Collection[str] = ()
    """Decode shards that others need more."""
    holder: str = ""
    """The prefill shard that computed this prompt's beginning before."""
    new_tokens: int = 128
    """How many tokens an answer has, on the average."""
    ahead_s: float = 0.0
    """Prefill of those that wait for the same window before this one."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class _Request:
    """A ticket's needs under the present mode."""

    ticket: Ticket
    max_new_tokens: int
    policy: Policy
    hint: Hint
    _kv: dict[int, int] = field(default_factory=dict)

    def kv_tokens(self, room: Room) -> int:
        """Prompt and output in whole blocks of this shard's pool."""
        block = room.block
        tokens = self._kv.get(block)
        if tokens is None:
            tokens = -(-(self.ticket.prompt_tokens + self.max_new_tokens) // block) * block
            self._kv[block] = tokens
        return tokens

    def record_bytes(self, room: Room) -> int:
        return self.ticket.prompt_tokens * room.view.bytes_per_token

    @property
    def new_tokens(self) -> int:
        """That the answer will probably have."""
        return min(self.max_new_tokens, self.hint.new_tokens)

    @property
    def choice(self) -> Choice | None:
        return self.ticket.choice or self.policy.choice


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
    request = _Request(ticket, allowed, policy or _PLAIN_POLICY, hint or _PLAIN_HINT)
    if _too_large(request, fleet):
        return _refusal(request, fleet)
    if not fleet.ready:
        return Wait("no_shard_ready")
    if request.hint.shared is not None and (grant := _shared(request, fleet)) is not None:
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


# --- which way ----------------------------------------------------------------------------------


def _obstacle(request: _Request, fleet: Fleet) -> str:
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


def _between(request: _Request, way: Way, prefill: Room, decode: Room) -> Way:
    """The way between two shards, or what keeps them from serving the request when idle."""
    if way[0] != OPEN:
        return way
    if not prefill.fits(request.record_bytes(prefill)):
        return 3, "record_too_large"
    if request.kv_tokens(decode) > decode.limit.kv_tokens:
        return 4, "decode_too_small"
    return way


def _either(request: _Request, fleet: Fleet) -> Grant | Wait:
    """A pair, or one shard where the cost model says that splitting does not pay."""
    pair = _pair(request, fleet)
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
    if pair is None or not pair.now:
        reason = _full_reason(request, fleet) if pair is None else "prefill_window"
        if pair is None or not fleet.priced:
            # A shard launched for mixed work takes what finds no pair with room.
            return _mixed(request, fleet, (Role.MIXED,), reason) or Wait(reason)
        return Wait(reason)
    return _split_grant(request, pair, predictions)


def _full_reason(request: _Request, fleet: Fleet) -> str:
    with_room = [room for room in fleet.by_role[Role.DECODE] if room.takes(request.kv_tokens(room))]
    only = request.hint.only
    if only is not None and not any(room.view.shard in only for room in with_room):
        return "hot_full"
    return "prefill_full" if with_room else "decode_full"


# --- separated ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pair:
    prefill: Room
    decode: Room
    pull: str
    now: bool
    """False: the prefill shard takes no further prompt of this length at the moment."""


def _pair(request: _Request, fleet: Fleet) -> _Pair | None:
    """The prefill shard that is free first with the decode shard that steps fastest, both with room.

    Shards that take the prompt now go before those whose window is closed.
    """
    prefills = fleet.by_role[Role.PREFILL]
    ajar, gate, tokens = request.hint.ajar, request.hint.gate, request.ticket.prompt_tokens
    taking = prefills if ajar is None else [room for room in prefills if room.view.shard in ajar]
    for prefill in _by_turn(request, taking):
        if gate(prefill, tokens) and (pair := _with_decode(request, fleet, prefill, now=True)) is not None:
            return pair
    for prefill in sorted(prefills, key=BY_RANK):
        if (pair := _with_decode(request, fleet, prefill, now=False)) is not None:
            return pair
    return None


def _with_decode(request: _Request, fleet: Fleet, prefill: Room, *, now: bool) -> _Pair | None:
    record_bytes = request.record_bytes(prefill)
    if not (prefill.exports(record_bytes) and prefill.fits(record_bytes)):
        return None
    decode = _decode_for(request, fleet, prefill)
    return None if decode is None else _Pair(prefill, *decode, now=now)


def _by_turn(request: _Request, prefills: Sequence[Room]) -> Iterator[Room]:
    """By rank; the holder of the prompt's beginning first, unless it has much more to do than the others."""
    if len(prefills) < 2:
        yield from prefills
        return
    first = min(prefills, key=BY_RANK)
    holder = request.hint.holder
    if holder and holder != first.view.shard:
        own = next((room for room in prefills if room.view.shard == holder), None)
        if own is not None and _bounded(own, prefills):
            yield own
    yield first
    yield from sorted(prefills, key=BY_RANK)[1:]


LOAD_BOUND = 1.25
"""Of the mean load, one prompt aside: beyond it a prefix is no reason to wait (bounded-load hashing)."""


def _bounded(room: Room, prefills: Sequence[Room]) -> bool:
    return room.records <= LOAD_BOUND * sum(each.records for each in prefills) / len(prefills)


def _decode_for(request: _Request, fleet: Fleet, prefill: Room) -> tuple[Room, str] | None:
    """The decode shard for records of `prefill`, and where it pulls them from.

    Arenas that both map go first, unless the shard there is slower by more than the pull takes.
    """
    paths = fleet.paths(prefill)
    only, avoid = request.hint.only, request.hint.avoid
    if paths.all_in_place and only is None and not avoid:
        first = min(fleet.decodes, key=BY_RANK)
        if first.takes(request.kv_tokens(first)):
            return first, ""
    best: tuple[tuple[bool, float, bool, int, int], Room, str] | None = None
    bytes_ = request.record_bytes(prefill)
    for room, (far, pull) in zip(fleet.decodes, paths.ways, strict=True):
        name = room.view.shard
        if far != OPEN or (only is not None and name not in only) or not room.takes(request.kv_tokens(room)):
            continue
        load, legs, order = room.rank
        if pull and room.costs.pull is not None:
            load += room.costs.pull.seconds(bytes_) / max(request.new_tokens, 1)
        rank = (name in avoid, load, bool(pull), legs, order)
        if best is None or rank < best[0]:
            best = rank, room, pull
    return None if best is None else best[1:]


def _of_pair(request: _Request, pair: _Pair) -> Prediction:
    return separated_s(
        pair.prefill,
        pair.decode,
        prompt_tokens=request.ticket.prompt_tokens,
        record_bytes=request.record_bytes(pair.prefill),
        new_tokens=request.new_tokens,
        pull=bool(pair.pull),
        ahead_s=0.0 if pair.now else request.hint.ahead_s,
    )


def _split_grant(request: _Request, pair: _Pair, predicted: dict[str, float]) -> Grant:
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


def _shared(request: _Request, fleet: Fleet) -> Grant | None:
    """A decode shard that reads the record of an earlier request in place."""
    shared = request.hint.shared
    assert shared is not None, "asked for where there is one"
    owner = fleet.room(shared.owner)
    if owner is None or not _own_first_token(request.ticket, shared, owner.view):
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


def _own_first_token(ticket: Ticket, shared: SharedRecord, owner: ShardView) -> bool:
    """TGI's server begins with the token that stands in the record: right where both take the likeliest."""
    return owner.engine == EMBEDDED or (ticket.greedy and shared.greedy)


# --- mixed --------------------------------------------------------------------------------------


def _mixed(request: _Request, fleet: Fleet, order: Sequence[Role], reason: str) -> Grant | None:
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


def _cheapest_whole(request: _Request, fleet: Fleet) -> tuple[Room, Prediction] | None:
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
        if not rooms:
            continue
        room = min(rooms, key=BY_RANK)
        if not room.takes(request.kv_tokens(room)):
            continue
        found = mixed_s(room, prompt_tokens=tokens, new_tokens=new)
        if best is None or found.cost_s < best[1].cost_s:
            best = room, found
    return best


def _whole_grant(request: _Request, room: Room, reason: str, predicted: dict[str, float]) -> Grant:
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


def _too_large(request: _Request, fleet: Fleet) -> bool:
    """By the roomiest pool: blocks are whole, so each shard is asked only where it is close."""
    tokens = request.ticket.prompt_tokens + request.max_new_tokens
    if tokens + 1024 <= fleet.most_kv_tokens:
        return False
    return bool(fleet.views) and all(_blocks(tokens, view) > view.kv_tokens for view in fleet.views)


def _blocks(tokens: int, view: ShardView) -> int:
    block = max(view.fingerprint.block_size, 1)
    return -(-tokens // block) * block


def _refusal(request: _Request, fleet: Fleet) -> Refuse:
    tokens = request.ticket.prompt_tokens + request.max_new_tokens
    return Refuse(
        "too_large",
        f"The request needs {tokens} tokens of KV cache and the largest shard holds {fleet.most_kv_tokens}.",
    )
