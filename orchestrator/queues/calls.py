"""One function per script: which keys and arguments it gets.  See `scripts` for what each one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.shard import Watched
from orchestrator.core.ticket import Capacity, Completion, Grant, Leg, Relayed, ShardView, Ticket
from orchestrator.queues import scripts, wire
from orchestrator.queues.keys import GROUP, PARTS, Keys
from orchestrator.queues.scripts import Script


@dataclass(frozen=True, slots=True)
class Timings:
    """Every deadline and period of the queue, in seconds."""

    heartbeat_s: float = 1.0
    """Gateways tell what they have open, and read the shard table, this often."""
    lease_s: float = 5.0
    """Reservations of a gateway outlive its last heartbeat by this."""
    own_decision_s: float = 0.25
    """A gateway without an answer decides for itself after this."""
    deadline_s: float = 1.0
    """For one attempt of one call; there are two."""
    block_s: float = 0.5
    """Longest blocking read; below the deadline."""
    shard_ttl_s: float = 10.0
    leader_ttl_s: float = 2.5
    """A standby takes over this long after the leader's last sign of life."""
    settle_s: float = 2.0
    """A Redis that came up empty, or stood still, grants nothing for this long, and nobody counts as dead:
    gateways tell what they hold first."""


@dataclass(frozen=True, slots=True)
class Call:
    """One script with its keys and arguments."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | int]


# --- a gateway's --------------------------------------------------------------------------------


def submit(keys: Keys, ticket: Ticket, queue_size: int) -> Call:
    return Call(
        scripts.SUBMIT,
        (keys.tickets, keys.queued(ticket.gateway), keys.leases(ticket.gateway), keys.gateways),
        (ticket.handle, wire.encode(ticket), queue_size, ticket.gateway),
    )


def complete(keys: Keys, gateway: str, completion: Completion) -> Call:
    return Call(
        scripts.COMPLETE,
        (keys.tickets, keys.queued(gateway), keys.leases(gateway), keys.reserved, keys.completions),
        (completion.handle, wire.encode(completion), GROUP),
    )


def relayed(keys: Keys, gateway: str, grant: Grant, relayed: Relayed) -> Call:
    """`grant`: what is held from now on."""
    return Call(
        scripts.RELAYED,
        (keys.leases(gateway), keys.reserved, keys.completions),
        (grant.handle, wire.lease(grant), wire.encode(relayed)),
    )


def heartbeat(
    keys: Keys, gateway: str, granted: Sequence[str], undecided: Sequence[str], timings: Timings
) -> Call:
    return Call(
        scripts.HEARTBEAT,
        (
            keys.gateway(gateway),
            keys.gateways,
            keys.queued(gateway),
            keys.leases(gateway),
            keys.reserved,
            keys.tickets,
            keys.completions,
            keys.born,
            keys.seen,
        ),
        (gateway, ms(timings.lease_s), GROUP, _standstill_ms(timings), len(granted), *granted, *undecided),
    )


def restore(keys: Keys, gateway: str, grant: Grant) -> Call:
    return Call(
        scripts.RESTORE,
        (keys.leases(gateway), keys.reserved, keys.queued(gateway), keys.tickets, keys.gateways),
        (grant.handle, wire.lease(grant), GROUP, gateway),
    )


def table(keys: Keys) -> Call:
    return Call(
        scripts.TABLE,
        (keys.leader, keys.mode, keys.gateways, keys.tickets, keys.reserved, keys.shards),
        (keys.shard(""),),
    )


def reap(keys: Keys, timings: Timings) -> Call:
    return Call(
        scripts.REAP,
        (keys.gateways, keys.reserved, keys.tickets, keys.completions, keys.born, keys.seen),
        (keys.prefix, GROUP, _standstill_ms(timings), ms(timings.settle_s)),
    )


def _standstill_ms(timings: Timings) -> int:
    """Without any sign of life for so long, gateways have given Redis up and decided alone."""
    return ms(2 * timings.deadline_s)


# --- a decision ---------------------------------------------------------------------------------


def commit(
    keys: Keys, leader: str, ticket: Ticket, grant: Grant, shards: Sequence[ShardView], timings: Timings
) -> Call:
    """`leader` is empty for a gateway's own decision; `shards` is the snapshot that was decided on."""
    decode = _limits(grant.decode, shards)
    prefill = decode if grant.prefill is None else _limits(grant.prefill, shards)
    return Call(
        scripts.COMMIT,
        (
            keys.leader,
            keys.born,
            keys.tickets,
            keys.gateway(ticket.gateway),
            keys.queued(ticket.gateway),
            keys.leases(ticket.gateway),
            keys.grants(ticket.gateway),
            keys.reserved,
            keys.shard(grant.decode.shard),
            keys.shard((grant.prefill or grant.decode).shard),
            keys.gateways,
            keys.pulse,
        ),
        (
            leader,
            ticket.handle,
            wire.lease(grant),
            GROUP,
            ms(timings.settle_s),
            wire.leg_incarnation(grant.decode),
            wire.leg_incarnation(grant.prefill),
            decode.kv_tokens,
            decode.slots,
            decode.requests,
            prefill.requests,
            prefill.arena_bytes,
            ticket.gateway,
        ),
    )


def _limits(leg: Leg, shards: Sequence[ShardView]) -> Capacity:
    for view in shards:
        if view.shard == leg.shard and view.epoch == leg.epoch:
            return view.capacity
    raise ValueError(f"Shard {leg.shard} is not in the snapshot that was decided on.")


# --- a conductor's ------------------------------------------------------------------------------


def refuse(keys: Keys, leader: str, ticket: Ticket, refusal: wire.Refusal) -> Call:
    return Call(
        scripts.REFUSE,
        (keys.leader, keys.tickets, keys.queued(ticket.gateway), keys.grants(ticket.gateway)),
        (leader, ticket.handle, wire.encode(refusal), GROUP),
    )


def lead(keys: Keys, conductor: str, timings: Timings) -> Call:
    return Call(
        scripts.LEAD,
        (keys.leader, keys.fence, keys.born, keys.seen),
        (conductor, ms(timings.leader_ttl_s), _standstill_ms(timings)),
    )


def resign(keys: Keys, leader: str) -> Call:
    return Call(scripts.RESIGN, (keys.leader,), (leader,))


def publish(
    keys: Keys,
    leader: str,
    shards: Sequence[Watched],
    problems: Mapping[str, str],
    views: Mapping[str, ShardView],
    timings: Timings,
) -> Call:
    """By shard, `problems`: a sentence for those that do not run as they should; `views`: what is known
    beyond its own status."""
    args: list[str | int] = [leader, ms(timings.shard_ttl_s), keys.shard("")]
    for watched in shards:
        view = views.get(watched.shard) or watched.view()
        args += [
            watched.shard,
            str(watched.state),
            wire.incarnation(watched.shard, watched.epoch),
            "" if view is None else wire.encode(view),
            problems.get(watched.shard, ""),
        ]
    return Call(scripts.PUBLISH, (keys.leader, keys.shards), args)


def retire(keys: Keys, leader: str, shard: str, epoch: int) -> Call:
    name = wire.incarnation(shard, epoch)
    return Call(scripts.RETIRE, (keys.leader, keys.reserved), (leader, *(f"{name}|{part}" for part in PARTS)))


def ms(seconds: float) -> int:
    return int(seconds * 1000)
