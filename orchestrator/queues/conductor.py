"""A conductor's side of the queue: the leader lock, tickets, commits, ends, the shard registry.

Everything that changes something carries the leader value it was decided under; Redis refuses it once
another conductor leads, and the caller gets `Deposed`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from orchestrator.core.pending import Place
from orchestrator.core.routing import Mode, Refuse
from orchestrator.core.shard import Watched
from orchestrator.core.snapshot import Reserved
from orchestrator.core.ticket import Completion, Grant, ShardView, Ticket
from orchestrator.errors import OrchestratorError, Unreachable
from orchestrator.queues import calls, wire
from orchestrator.queues.calls import Timings
from orchestrator.queues.link import BATCH, ScriptRunner, answered, connect
from orchestrator.queues.scripts import BODY, GROUP, PARTS, Keys
from orchestrator.queues.table import read_mode
from tgi_patches.contract import checked_part, new_epoch

log = structlog.get_logger()

READ_MOST = 512
"""Entries per stream and read."""


class Deposed(OrchestratorError):
    """Another conductor leads."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What one read brought."""

    tickets: dict[Place, Ticket] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)


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
    """One conductor's connection.  `leader` is empty while it does not lead."""

    def __init__(
        self, redis: str | Redis, deployment: str, conductor_id: str, *, timings: Timings | None = None
    ) -> None:
        self.conductor = checked_part(f"{conductor_id}.{new_epoch()}", "conductor name")
        self.timings = timings or Timings()
        self.leader = ""
        self._client = connect(redis, self.timings)
        self._owns_client = not isinstance(redis, Redis)
        self._keys = Keys(checked_part(deployment, "deployment name"))
        self._runner = ScriptRunner(self._client, self._keys, self.timings)
        self._seen: list[str] = []
        """Completions that were read and not yet acknowledged."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Raises Unreachable without Redis, ConfigError for a foreign schema."""
        try:
            await self._runner.enter()
        except OrchestratorError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Give up the lead, so that a standby takes over at once."""
        if self.leader:
            try:
                await self._runner.one(calls.resign(self._keys, self.leader))
            except Unreachable as error:
                log.warning("resign_failed", error=str(error))
            self.leader = ""
        if self._owns_client:
            await self._client.aclose()

    # --- leading --------------------------------------------------------------------------------

    async def lead(self) -> bool:
        """Take the lead or keep it.  A new `leader` value is a new term: pending tickets must be claimed."""
        self.leader = await self._runner.one(calls.lead(self._keys, self.conductor, self.timings))
        return bool(self.leader)

    async def publish(self, shards: Sequence[Watched], problems: Mapping[str, str] | None = None) -> None:
        """The whole registry; what is not in it is removed."""
        call = calls.publish(self._keys, self._term(), shards, problems or {}, self.timings)
        self._check(await self._runner.one(call))

    async def retire(self, shard: str, epoch: int) -> None:
        """Drop what is reserved on an incarnation that is gone; its leases then free nothing there."""
        name = wire.incarnation(shard, epoch)
        fields = [f"{name}|{part}" for part in PARTS]
        await self._redis(lambda: self._client.hdel(self._keys.reserved, *fields))

    async def reap(self) -> int:
        """End the requests of gateways whose heartbeat stopped; how many."""
        return int(await self._runner.one(calls.reap(self._keys)))

    async def set_mode(self, mode: Mode) -> None:
        await self._redis(lambda: self._client.set(self._keys.mode, wire.encode(mode)))

    # --- tickets --------------------------------------------------------------------------------

    async def read(self, *, block: bool) -> Arrived:
        """New tickets and ends; waits up to `block_s` for the first one if `block`."""
        wait_ms = max(1, calls.ms(self.timings.block_s)) if block else None
        streams: Any = {self._keys.tickets: ">", self._keys.completions: ">"}
        # One attempt: what a lost answer delivered is pending under our name, and `claim` finds it.
        found = await self._redis(
            lambda: self._client.xreadgroup(GROUP, self.conductor, streams, count=READ_MOST, block=wait_ms),
            attempts=1,
        )
        arrived = Arrived()
        for stream, entries in found or ():
            if stream == self._keys.tickets:
                arrived.tickets.update(await self._tickets(entries))
            else:
                self._seen += [entry_id for entry_id, _ in entries]
                arrived.completions.extend(_readable(entries, wire.completion))
        return arrived

    async def claim(self, *, everything: bool) -> dict[Place, Ticket]:
        """Tickets that were delivered to other conductors (or to us, with `everything`) and not decided."""
        if not everything and not await self._others_hold():
            return {}
        claimed: dict[Place, Ticket] = {}
        cursor = ""
        while cursor != "0-0":
            cursor, entries, *_ = await self._redis(partial(self._autoclaim, cursor or "0-0"))
            claimed.update(await self._tickets(entries))
        return claimed

    async def books(self, heads: Sequence[Ticket] = ()) -> Books:
        """Reservations, mode and which of `heads` are still queued, in one round trip.

        Also acknowledges the ends that were read.
        """
        seen, self._seen = self._seen, []

        async def read() -> Any:
            pipe = self._client.pipeline(transaction=False)
            pipe.hgetall(self._keys.reserved)
            pipe.get(self._keys.mode)
            for ticket in heads:
                pipe.hexists(self._keys.queued(ticket.gateway), ticket.handle)
            if seen:
                pipe.xack(self._keys.completions, GROUP, *seen)
            return await pipe.execute()

        reserved, mode, *known = await self._redis(read)
        return Books(
            reserved={name: int(value) for name, value in reserved.items()},
            mode=read_mode(mode or ""),
            gone=frozenset(t.handle for t, queued in zip(heads, known, strict=False) if not queued),
        )

    async def commit(self, commits: Sequence[Commit]) -> list[str]:
        """Results in order: `granted`, `duplicate`, `gone` (decided or withdrawn), `silent` (its gateway),
        `full`, `stale` (the shard changed), `settling`.  Raises Deposed."""
        leader, results = self._term(), list[str]()
        for start in range(0, len(commits), BATCH):
            batch = [
                calls.commit(self._keys, leader, one.ticket, one.grant, one.shards, self.timings)
                for one in commits[start : start + BATCH]
            ]
            for reply in await self._runner.run(batch):
                if isinstance(reply, Unreachable):
                    raise reply
                results.append(self._check(reply[0]))
        return results

    async def refuse(self, ticket: Ticket, refused: Refuse) -> None:
        """Answer a ticket that no shard could ever serve."""
        refusal = wire.Refusal(ticket.handle, refused)
        self._check(await self._runner.one(calls.refuse(self._keys, self._term(), ticket, refusal)))

    # --- Redis ----------------------------------------------------------------------------------

    def _term(self) -> str:
        """The leader value to act under: an empty one would pass for a gateway's own decision."""
        if not self.leader:
            raise Deposed("This conductor does not lead.")
        return self.leader

    def _check(self, result: str) -> str:
        if result == "fenced":
            raise Deposed("Another conductor leads.")
        return result

    async def _others_hold(self) -> bool:
        summary: Any = await self._redis(lambda: self._client.xpending(self._keys.tickets, GROUP))
        return any(consumer["name"] != self.conductor for consumer in summary["consumers"])

    def _autoclaim(self, cursor: str) -> Awaitable[Any]:
        return self._client.xautoclaim(
            self._keys.tickets, GROUP, self.conductor, min_idle_time=0, start_id=cursor, count=READ_MOST
        )

    async def _tickets(
        self, entries: Sequence[tuple[str | None, dict[str, str] | None]]
    ) -> dict[Place, Ticket]:
        """By place in the stream; what cannot be read is logged and removed."""
        found: dict[Place, Ticket] = {}
        for entry_id, fields in entries:
            if entry_id is None or fields is None:
                continue  # deleted while it was pending: Redis 6.2 still lists it
            try:
                found[_place(entry_id)] = wire.ticket(fields.get(BODY, ""))
            except wire.WireError as error:
                log.warning("ticket_unreadable", entry=entry_id, error=str(error))
                await self._discard(entry_id)
        return found

    async def _discard(self, entry_id: str) -> None:
        async def both() -> Any:
            pipe = self._client.pipeline(transaction=False)
            pipe.xack(self._keys.tickets, GROUP, entry_id)
            pipe.xdel(self._keys.tickets, entry_id)
            return await pipe.execute()

        await self._redis(both)

    async def _redis(self, attempt: Callable[[], Awaitable[Any]], *, attempts: int = 2) -> Any:
        """A plain command; makes the consumer groups where Redis does not know them (yet, or any more)."""
        for again in (True, False):
            try:
                return await answered(self.timings.deadline_s, attempt, attempts=attempts)
            except ResponseError as error:
                if not (again and "NOGROUP" in str(error)):
                    raise Unreachable(f"Redis refused a command: {error}") from None
                await self._make_groups()
        raise AssertionError("the second attempt returned or raised")

    async def _make_groups(self) -> None:
        for stream in (self._keys.tickets, self._keys.completions):
            make = partial(self._client.xgroup_create, stream, GROUP, id="0", mkstream=True)
            try:
                await answered(self.timings.deadline_s, make)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise Unreachable(f"Redis refused a command: {error}") from None


def _place(entry_id: str) -> Place:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)


def _readable(entries: Sequence[tuple[str, dict[str, str]]], decode: Callable[[str], Any]) -> list[Any]:
    found = []
    for entry_id, fields in entries:
        try:
            found.append(decode(fields.get(BODY, "")))
        except wire.WireError as error:
            log.warning("completion_unreadable", entry=entry_id, error=str(error))
    return found
