"""How facts travel through Redis: JSON, and leases with a head that Lua can read without JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from orchestrator.core.cost import KINDS, Costs
from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.ticket import (
    Choice,
    Completion,
    Grant,
    Leg,
    Outcome,
    Relayed,
    ShardView,
    SharedRecord,
    Ticket,
)
from orchestrator.queues.keys import BODY
from tgi_patches.contract import Fingerprint, Limits, Role

T = TypeVar("T")


class WireError(ValueError):
    """An entry in Redis that this version cannot read."""


def encode(fact: Any) -> str:
    """Compact JSON of a dataclass, nested ones included."""
    # Keys may be words of an enumeration, which orjson does not take for strings by itself.
    return orjson.dumps(fact, option=orjson.OPT_NON_STR_KEYS).decode()


def body(fields: Sequence[str]) -> str:
    """The JSON of a stream entry, given as Redis' flat field, value list; empty where there is none."""
    if len(fields) == 2 and fields[0] == BODY:
        return fields[1]
    return next((value for name, value in zip(fields[::2], fields[1::2], strict=False) if name == BODY), "")


def _decoded(text: str, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        return build(orjson.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"An entry in Redis cannot be read: {error}") from None


@functools.cache
def _names(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def _known(kind: type[Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that this version knows: the next one may add some.  `raw` itself where it has no other."""
    names = _names(kind)  # type: ignore[arg-type]  # mypy: a type of Any is not hashable
    if raw.keys() <= names:
        return raw
    return {name: value for name, value in raw.items() if name in names}


def ticket(text: str) -> Ticket:
    def build(raw: dict[str, Any]) -> Ticket:
        known = _known(Ticket, raw)
        if raw.get("choice") is not None:
            known["choice"] = Choice(raw["choice"])
        return Ticket(**known)

    return _decoded(text, build)


def completion(text: str) -> Completion | Relayed:
    """An entry of the completions stream."""

    def build(raw: dict[str, Any]) -> Completion | Relayed:
        if "outcome" not in raw:
            return Relayed(**_known(Relayed, raw))
        return Completion(**{**_known(Completion, raw), "outcome": Outcome(raw["outcome"])})

    return _decoded(text, build)


def mode(text: str) -> Mode:
    """The mode key; an absent one is the normal mode."""

    def build(raw: dict[str, Any]) -> Mode:
        found = Mode(**_known(Mode, raw))
        caps = found.output_cap is None or (type(found.output_cap) is int and found.output_cap > 0)
        sheds = found.shed_below is None or type(found.shed_below) is int
        level = type(found.level) is int and found.level >= 0
        if not (caps and sheds and level and type(found.auto) is bool and type(found.reason) is str):
            raise ValueError("it is no mode")
        return found

    return _decoded(text or "{}", build)


def view(text: str, state: str) -> ShardView:
    """A published shard, in the state that was published beside it."""

    def build(raw: dict[str, Any]) -> ShardView:
        known = _known(ShardView, raw)
        known["role"] = Role(raw["role"])
        known["fingerprint"] = Fingerprint(**_known(Fingerprint, raw["fingerprint"]))
        known["limits"] = Limits.from_dict(raw["limits"])
        known["state"] = state
        known["costs"] = costs(raw.get("costs"))
        return ShardView(**known)

    return _decoded(text, build)


def costs(raw: Mapping[str, Any] | None) -> Costs | None:
    """A shard's cost model, as `encode` writes it.  KeyError or TypeError for something else."""
    if raw is None:
        return None
    parts: dict[str, Any] = {
        name: kind(**_known(kind, part)) for name, kind in KINDS.items() if (part := raw.get(name))
    }
    return Costs(**parts)


def grant(text: str) -> Grant:
    return _decoded(text, _grant)


def _grant(raw: dict[str, Any]) -> Grant:
    prefill = raw["prefill"]
    known = _known(Grant, raw)
    known["choice"] = Choice(raw["choice"])
    known["decode"] = Leg(**_known(Leg, raw["decode"]))
    known["prefill"] = None if prefill is None else Leg(**_known(Leg, prefill))
    shared = raw.get("shared")
    if shared is not None:
        known["shared"] = SharedRecord(shared["handle"], Leg(**_known(Leg, shared["owner"])))
    return Grant(**known)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The conductor's no, as it travels to a gateway."""

    handle: str
    refused: Refuse


def answer(text: str) -> Grant | Refusal:
    """An entry of a grants stream."""

    def build(raw: dict[str, Any]) -> Grant | Refusal:
        if "refused" in raw:
            return Refusal(raw["handle"], Refuse(**_known(Refuse, raw["refused"])))
        return _grant(raw)

    return _decoded(text, build)


# --- leases and counters ------------------------------------------------------------------------


def incarnation(shard: str, epoch: int) -> str:
    return f"{shard}.{epoch}"


def leg_incarnation(leg: Leg | None) -> str:
    return "" if leg is None else incarnation(leg.shard, leg.epoch)


def lease(granted: Grant) -> str:
    """`kv|bytes|decode|prefill|<grant>`, as `scripts` describes it."""
    head = (
        granted.kv_tokens,
        granted.record_bytes,
        leg_incarnation(granted.decode),
        leg_incarnation(granted.prefill),
    )
    return "|".join((*map(str, head), encode(granted)))


def leased(text: str) -> Grant:
    """The grant inside a lease."""
    parts = text.split("|", 4)
    if len(parts) != 5:
        raise WireError("A lease in Redis cannot be read.")
    return grant(parts[4])


Counters = Mapping[str, int]
"""`<shard>.<epoch>|<part>` -> amount."""


def counters(flat: list[str]) -> dict[str, int]:
    """Redis' flat field, value list as a mapping."""
    return {name: int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def booked(shard: ShardView, reserved: Counters) -> ShardView:
    """A view without reservations, with what is reserved on this incarnation."""
    name = incarnation(shard.shard, shard.epoch)
    return shard.booked(
        kv_tokens=reserved.get(f"{name}|kv", 0),
        slots=reserved.get(f"{name}|slots", 0),
        record_bytes=reserved.get(f"{name}|bytes", 0),
        records=reserved.get(f"{name}|records", 0),
    )
