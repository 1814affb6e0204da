"""One function per script: which keys and arguments it gets.  See `scripts` for what each one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.routing import Capacity, capacity
from orchestrator.core.shard import Watched
from orchestrator.core.ticket import Completion, Grant, Leg, Relayed, ShardView, Ticket
from orchestrator.queues import scripts, wire
from orchestrator.queues.scripts import GROUP, Keys, Script


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
    """A Redis that came up empty grants nothing for this long: gateways tell what they hold first."""


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
        (keys.tickets, keys.queued(ticket.gateway)),
        (ticket.handle, wire.encode(ticket), queue_size),
    )


def complete(keys: Keys, gateway: str, completion: Completion) -> Call:
    return Call(
        scripts.COMPLETE,
        (keys.tickets, keys.queued(gateway), keys.leases(gateway), keys.reserved, keys.completions),
        (completion.handle, wire.encode(completion), GROUP),
    )


def relayed(keys: Keys, gateway: str, grant: Grant) -> Call:
    """`grant`: what is held from now on."""
    return Call(
        scripts.RELAYED,
        (keys.leases(gateway), keys.reserved, keys.completions),
        (grant.handle, wire.lease(grant), wire.encode(Relayed(grant.handle))),
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
        ),
        (gateway, ms(timings.lease_s), GROUP, len(granted), *granted, *undecided),
    )


def restore(keys: Keys, gateway: str, grant: Grant) -> Call:
    return Call(
        scripts.RESTORE,
        (keys.leases(gateway), keys.reserved, keys.queued(gateway), keys.tickets),
        (grant.handle, wire.lease(grant), GROUP),
    )


def table(keys: Keys) -> Call:
    return Call(
        scripts.TABLE,
        (keys.leader, keys.mode, keys.gateways, keys.tickets, keys.reserved, keys.shards),
        (keys.shard(""),),
    )


def reap(keys: Keys) -> Call:
    return Call(
        scripts.REAP,
        (keys.gateways, keys.reserved, keys.tickets, keys.completions),
        (keys.prefix, GROUP),
    )


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
        ),
        (
            leader,
            ticket.handle,
            wire.lease(grant),
            wire.encode(grant),
            GROUP,
            ms(timings.settle_s),
            wire.leg_incarnation(grant.decode),
            wire.leg_incarnation(grant.prefill),
            decode.kv_tokens,
            decode.slots,
            decode.requests,
            prefill.requests,
            prefill.arena_bytes,
        ),
    )


def _limits(leg: Leg, shards: Sequence[ShardView]) -> Capacity:
    return next(capacity(view) for view in shards if view.shard == leg.shard and view.epoch == leg.epoch)


# --- a conductor's ------------------------------------------------------------------------------


def refuse(keys: Keys, leader: str, ticket: Ticket, refusal: wire.Refusal) -> Call:
    return Call(
        scripts.REFUSE,
        (keys.leader, keys.tickets, keys.queued(ticket.gateway), keys.grants(ticket.gateway)),
        (leader, ticket.handle, wire.encode(refusal), GROUP),
    )


def lead(keys: Keys, conductor: str, timings: Timings) -> Call:
    return Call(scripts.LEAD, (keys.leader, keys.fence), (conductor, ms(timings.leader_ttl_s)))


def resign(keys: Keys, leader: str) -> Call:
    return Call(scripts.RESIGN, (keys.leader,), (leader,))


def publish(
    keys: Keys, leader: str, shards: Sequence[Watched], problems: Mapping[str, str], timings: Timings
) -> Call:
    """`problems`: a sentence by shard, for those that do not run as they should."""
    args: list[str | int] = [leader, ms(timings.shard_ttl_s), keys.shard("")]
    for watched in shards:
        view = watched.view()
        args += [
            watched.shard,
            str(watched.state),
            wire.incarnation(watched.shard, watched.epoch),
            "" if view is None else wire.encode(view),
            problems.get(watched.shard, ""),
        ]
    return Call(scripts.PUBLISH, (keys.leader, keys.shards), args)


def ms(seconds: float) -> int:
    return int(seconds * 1000)
