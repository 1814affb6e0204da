"""Which prefill shard works with which decode shard for one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.core.decision import Request
from orchestrator.core.fleet import BY_RANK, OPEN, Fleet, Room
from tgi_patches.contract import Role


@dataclass(slots=True)
class Pair:
    prefill: Room
    decode: Room
    pull: str
    obstacle: str = ""
    """Why the prefill shard does not take the prompt at the moment."""


def pair_for(request: Request, fleet: Fleet) -> Pair | None:
    """The prefill shard that is free first with the decode shard that steps fastest, both with room.

    Shards that take the prompt now go before those that do not.  None where no decode shard has room.
    """
    prefills = fleet.by_role[Role.PREFILL]
    ajar, gate, tokens = request.hint.ajar, request.hint.gate, request.ticket.prompt_tokens
    taking = prefills if ajar is None else [room for room in prefills if room.view.shard in ajar]
    for prefill in _by_turn(request, taking):
        record_bytes = request.record_bytes(prefill)
        if prefill.exports(record_bytes) and prefill.fits(record_bytes) and gate(prefill, tokens):
            decode = _decode_for(request, fleet, prefill)
            if decode is not None:
                return Pair(prefill, *decode)
    for prefill in sorted(prefills, key=BY_RANK):
        record_bytes = request.record_bytes(prefill)
        decode = _decode_for(request, fleet, prefill) if prefill.fits(record_bytes) else None
        if decode is not None:
            full = not prefill.exports(record_bytes)
            return Pair(prefill, *decode, obstacle="prefill_full" if full else "prefill_window")
    return None


def _by_turn(request: Request, prefills: Sequence[Room]) -> Iterator[Room]:
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


def _decode_for(request: Request, fleet: Fleet, prefill: Room) -> tuple[Room, str] | None:
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
