"""A conductor's side of the queue: the leader lock, tickets, commits, ends, the shard registry.

Everything that changes something carries the leader value it was decided under; Redis refuses it once
another conductor leads, and the caller gets `Deposed`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import structlog

from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.pending import Place
from orchestrator.core.roll import Roll
from orchestrator.core.shard import Watched
from orchestrator.core.snapshot import Reserved
from orchestrator.core.ticket import Completion, Grant, Relayed, ShardView, Ticket
from orchestrator.errors import OrchestratorError, Unreachable
from orchestrator.queues import calls, wire
from orchestrator.queues.address import Command
from orchestrator.queues.calls import Timings
from orchestrator.queues.keys import GROUP, PARTS, Keys
from orchestrator.queues.link import ScriptRunner
from orchestrator.queues.mode import by_leader
from orchestrator.queues.resp import ATTEMPTS, Refused, RespClient
from orchestrator.queues.table import read_mode
from orchestrator.queues.wishes import Wanted, Wishes, forgotten, looked, looking, told
from tgi_patches.contract import ShardSpec, checked_part, new_epoch

log = structlog.get_logger()

READ_MOST = 512
"""Entries per stream and read."""

_Entry = tuple[str | None, list[str] | None] | None
"""Id and fields; what was deleted while it was pending lacks some of it in Redis 6.2."""


class Deposed(OrchestratorError):
    """Another conductor leads."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What one read brought."""

    tickets: dict[Place, Ticket] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    relayed: list[Relayed] = field(default_factory=list)
    """Records that were imported."""

    def hear(self, facts: Iterable[Completion | Relayed]) -> None:
        for fact in facts:
            if isinstance(fact, Relayed):
                self.relayed.append(fact)
            else:
                self.completions.append(fact)


@dataclass(frozen=True, slots=True)
class Books:
    """What is reserved now, and the mode."""

    reserved: wire.Counters
    mode: Mode = field(default_factory=Mode)
    gone: frozenset[str] = frozenset()
    """Handles that were withdrawn or decided by others."""

    def of(self, shard: str, epoch: int) -> Reserved:
        name = wire.incarnation(shard, epoch)
        return Reserved(*(self.reserved.get(f"{name}|{part}", 0) for part in PARTS))


@dataclass(frozen=True, slots=True)
class Commit:
    """A decision and the snapshot it was made on."""

    ticket: Ticket
    grant: Grant
    shards: Sequence[ShardView]


class ConductorQueue:
    """One conductor's connections: what waits has its own.  `leader` is empty while it does not lead."""

    def __init__(
        self, redis_url: str, deployment: str, conductor_id: str, *, timings: Timings | None = None
    ) -> None:
        self.conductor = checked_part(f"{conductor_id}.{new_epoch()}", "conductor name")
        self.timings = timings or Timings()
        self.leader = ""
        self._keys = Keys(checked_part(deployment, "deployment name"))
        self._runner = ScriptRunner(redis_url, self._keys, self.timings)
        self._reader = RespClient(redis_url, deadline_s=self.timings.deadline_s)
        self._seen: dict[str, None] = {}
        """Entries of `completions` that were read and not yet acknowledged."""
        self._claimed = Arrived()
        """Ends that had been delivered to others; the next read brings them."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Raises Unreachable without Redis, ConfigError for a foreign schema."""
        try:
            await self._runner.start()
        except OrchestratorError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Give up the lead as well."""
        await self.resign()
        await self._runner.aclose()
        await self._reader.aclose()

    # --- leading --------------------------------------------------------------------------------

    async def lead(self) -> bool:
        """Take the lead or keep it.  A new `leader` value is a new term: pending tickets must be claimed."""
        self.leader = await self._runner.send(calls.lead(self._keys, self.conductor, self.timings))
        return bool(self.leader)

    async def resign(self) -> None:
        """Give up the lead, so that a standby takes over at once."""
        if not self.leader:
            return
        try:
            await self._runner.send(calls.resign(self._keys, self.leader))
        except Unreachable as error:
            log.warning("resign_failed", error=str(error))
        self.leader = ""

    async def publish(
        self,
        shards: Sequence[Watched],
        problems: Mapping[str, str] | None = None,
        views: Mapping[str, ShardView] | None = None,
    ) -> None:
        """The whole registry; what is not in it is removed."""
        call = calls.publish(self._keys, self._term(), shards, problems or {}, views or {}, self.timings)
        self._check(await self._runner.send(call))

    async def retire(self, shard: str, epoch: int) -> None:
        """Drop what is reserved on an incarnation that is gone; its leases then free nothing there."""
        self._check(await self._runner.send(calls.retire(self._keys, self._term(), shard, epoch)))

    async def reap(self) -> int:
        """End the requests of gateways whose heartbeat stopped; how many."""
        return int(await self._runner.send(calls.reap(self._keys, self.timings)))

    async def set_mode(self, mode: Mode) -> bool:
        """False where an operator holds it.  Raises Deposed."""
        command = by_leader(self._keys, self._term(), mode)
        return self._check(await self._runner.client.send(*command)) == "set"

    # --- wishes ---------------------------------------------------------------------------------

    async def wishes(self) -> Wishes:
        """What an operator wants of the shards."""
        return looked(await self._runner.client.all(looking(self._keys)))

    async def tell(
        self, orders: Sequence[ShardSpec], roll: Roll, wanted: Wanted | None, drained: Iterable[str]
    ) -> None:
        """Of the leader's shards and its way to what is wanted; see `wishes.told`.  Raises Deposed."""
        command = told(self._keys, self._term(), orders, roll, wanted, drained)
        self._check(await self._runner.client.send(*command))

    async def give_back(self, shard: str) -> None:
        """A drained shard is no more, and its name is free for another."""
        await self._runner.client.send("SREM", self._keys.drained, shard)

    async def forget_wishes(self) -> None:
        """With the end of the deployment.  Raises Deposed."""
        self._check(await self._runner.client.send(*forgotten(self._keys, self._term())))

    # --- tickets --------------------------------------------------------------------------------

    async def read(self, *, block: bool, within_s: float = math.inf) -> Arrived:
        """New tickets and ends; waits up to `block_s` for the first one if `block`, or `within_s` if less."""
        arrived, self._claimed = self._claimed, Arrived()
        block = block and not (arrived.completions or arrived.relayed)
        longest_s = min(self.timings.block_s, within_s)
        waiting = ("BLOCK", max(1, calls.ms(longest_s))) if block else ()
        group = ("XREADGROUP", "GROUP", GROUP, self.conductor, "COUNT", READ_MOST, *waiting)
        streams = ("STREAMS", self._keys.tickets, self._keys.completions, ">", ">")
        # One attempt: what a lost answer delivered is pending under our name, and `claim` finds it.
        found = await self._in_group(self._reader, (*group, *streams), attempts=1)
        for stream, entries in found or ():
            if stream == self._keys.tickets:
                arrived.tickets.update(await self._tickets(entries))
            else:
                arrived.hear(self._ends(entries))
        return arrived

    async def claim(self, *, everything: bool) -> dict[Place, Ticket]:
        """Tickets that were delivered to other conductors (or to us, with `everything`) and not decided.

        Ends that others were told of come with the next read.
        """
        claimed: dict[Place, Ticket] = {}
        async for entries in self._taken(self._keys.tickets, everything):
            claimed.update(await self._tickets(entries))
        async for entries in self._taken(self._keys.completions, everything):
            self._claimed.hear(self._ends(entries))
        return claimed

    async def books(self, heads: Sequence[Ticket] = ()) -> Books:
        """Reservations, mode and which of `heads` are still queued, in one round trip.

        Also acknowledges the ends that were read, and with `heads` tells that these are looked at.
        """
        seen = list(self._seen)
        reading = self._reading(heads, seen, deciding=bool(heads))
        reserved, mode, *known = await self._runner.client.all(reading)
        self._acknowledged(seen)
        return _books(reserved, mode, heads, known)

    async def commit(self, commits: Sequence[Commit]) -> list[str]:
        """Results in order: `granted`, `duplicate`, `gone` (decided or withdrawn), `silent` (its gateway),
        `full`, `stale` (the shard changed), `settling`.  Raises Deposed."""
        return await self._results(self._send(commits))

    async def commit_and_read(self, commits: Sequence[Commit]) -> tuple[list[str], Books]:
        """The same, and the books as they are after it, in the same round trip."""
        sent, seen = self._send(commits), list(self._seen)
        reading = [self._runner.client.send(*command) for command in self._reading((), seen, deciding=True)]
        results = await self._results(sent)
        reserved, mode, *_ = [await reply for reply in reading]
        self._acknowledged(seen)
        return results, _books(reserved, mode)

    async def refuse(self, ticket: Ticket, refused: Refuse) -> None:
        """Answer a ticket that no shard could ever serve."""
        refusal = wire.Refusal(ticket.handle, refused)
        self._check(await self._runner.send(calls.refuse(self._keys, self._term(), ticket, refusal)))

    # --- Redis ----------------------------------------------------------------------------------

    def _send(self, commits: Sequence[Commit]) -> list[asyncio.Future[Any]]:
        leader = self._term()
        return [
            self._runner.send(
                calls.commit(self._keys, leader, one.ticket, one.grant, one.shards, self.timings)
            )
            for one in commits
        ]

    async def _results(self, sent: Sequence[asyncio.Future[Any]]) -> list[str]:
        return [self._check((await reply)[0]) for reply in sent]

    def _term(self) -> str:
        """The leader value to act under: an empty one would pass for a gateway's own decision."""
        if not self.leader:
            raise Deposed("This conductor does not lead.")
        return self.leader

    def _check(self, result: str) -> str:
        if result == "fenced":
            raise Deposed("Another conductor leads.")
        return result

    def _reading(
        self, heads: Sequence[Ticket], seen: Sequence[str], *, deciding: bool = False
    ) -> list[Command]:
        """`deciding`: tell the gateways that their tickets are looked at."""
        commands: list[Command] = [("HGETALL", self._keys.reserved), ("GET", self._keys.mode)]
        commands += [("HEXISTS", self._keys.queued(ticket.gateway), ticket.handle) for ticket in heads]
        if deciding and self.leader:
            ttl_ms = max(1, calls.ms(self.timings.own_decision_s))
            commands.append(("SET", self._keys.pulse, self.leader, "PX", ttl_ms))
        if seen:
            commands.append(("XACK", self._keys.completions, GROUP, *seen))
            commands.append(("XDEL", self._keys.completions, *seen))
        return commands

    def _acknowledged(self, seen: Iterable[str]) -> None:
        for entry_id in seen:
            self._seen.pop(entry_id, None)

    async def _taken(self, stream: str, everything: bool) -> AsyncIterator[Sequence[_Entry]]:
        """Entries of a stream that are now ours and were delivered to others, or to us and not dealt with."""
        if not everything and not await self._others_hold(stream):
            return
        cursor = ""
        while cursor != "0-0":
            command = ("XAUTOCLAIM", stream, GROUP, self.conductor, 0, cursor or "0-0", "COUNT", READ_MOST)
            cursor, entries, *_ = await self._in_group(self._runner.client, command)
            yield entries

    async def _others_hold(self, stream: str) -> bool:
        *_, consumers = await self._in_group(self._runner.client, ("XPENDING", stream, GROUP))
        return any(name != self.conductor for name, _ in consumers or ())

    def _ends(self, entries: Sequence[_Entry]) -> list[Completion | Relayed]:
        """What entries of `completions` say that were not seen yet; all wait for their acknowledgement."""
        new = [(i, fields) for i, fields in filter(None, entries) if i and fields and i not in self._seen]
        self._seen.update((entry_id, None) for entry_id, _ in new)
        return _readable(new, wire.completion)

    async def _tickets(self, entries: Sequence[_Entry]) -> dict[Place, Ticket]:
        """By place in the stream; what cannot be read is logged and removed."""
        found: dict[Place, Ticket] = {}
        for entry_id, fields in filter(None, entries):
            if entry_id is None or fields is None:
                continue  # deleted while it was pending: Redis 6.2 still lists it
            try:
                found[_place(entry_id)] = wire.ticket(wire.body(fields))
            except wire.WireError as error:
                log.warning("ticket_unreadable", entry=entry_id, error=str(error))
                await self._discard(entry_id)
        return found

    async def _discard(self, entry_id: str) -> None:
        stream = self._keys.tickets
        await self._runner.client.all([("XACK", stream, GROUP, entry_id), ("XDEL", stream, entry_id)])

    async def _in_group(self, client: RespClient, command: Command, *, attempts: int = ATTEMPTS) -> Any:
        """The reply; makes the consumer groups where Redis does not know them (yet, or any more)."""
        try:
            return await client.send(*command, attempts=attempts)
        except Refused as error:
            if "NOGROUP" not in error.reply:
                raise
        await self._make_groups()
        return await client.send(*command, attempts=attempts)

    async def _make_groups(self) -> None:
        for stream in (self._keys.tickets, self._keys.completions):
            try:
                await self._runner.client.send("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
            except Refused as error:
                if "BUSYGROUP" not in error.reply:
                    raise


def _books(
    reserved: list[str], mode: str | None, heads: Sequence[Ticket] = (), known: Sequence[int] = ()
) -> Books:
    return Books(
        reserved=wire.counters(reserved),
        mode=read_mode(mode or ""),
        gone=frozenset(t.handle for t, queued in zip(heads, known, strict=False) if not queued),
    )


def _place(entry_id: str) -> Place:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)


def _readable(entries: Sequence[tuple[str, list[str]]], decode: Callable[[str], Any]) -> list[Any]:
    found = []
    for entry_id, fields in entries:
        try:
            found.append(decode(wire.body(fields)))
        except wire.WireError as error:
            log.warning("completion_unreadable", entry=entry_id, error=str(error))
    return found
