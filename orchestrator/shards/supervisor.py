"""Keeps the shards of a deployment running, and follows where other ones are wanted.

Shards outlive a term: a conductor that leads again finds them through the launcher, by what they were
launched with.  `keeping` has the life of one shard, `rolling` the way from one set to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from orchestrator.core.roll import Roll
from orchestrator.core.rolling import match, missing
from orchestrator.core.shard import Drained, Exited, Rules, Watched
from orchestrator.errors import ConfigError, ShardError, Unreachable
from orchestrator.shards.keeping import CRASH_LOOP as CRASH_LOOP
from orchestrator.shards.keeping import Keeping, UntilIdle
from orchestrator.shards.keeping import Pace as Pace
from orchestrator.shards.launcher import Launcher, Running
from orchestrator.shards.probe import StatusProbe
from orchestrator.shards.rolling import PlaceFor, Rolling, RoomFor, always_room, as_planned
from orchestrator.shards.states import States
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

AWAY_S = 0.5


async def _at_once(_shard: str, _epoch: int) -> None:
    return


class Supervisor:
    """See `States` for what is known, `Rolling` for what is being done about it."""

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ShardSpec],
        probe: StatusProbe,
        *,
        until_idle: UntilIdle = _at_once,
        room_for: RoomFor = always_room,
        place_for: PlaceFor = as_planned,
        rules: Rules | None = None,
        pace: Pace | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.states = States(_checked(specs), rules or Rules(), now)
        self._launcher = launcher
        pace = pace or Pace()
        self._keeping = Keeping(self.states, launcher, probe, until_idle, pace)
        self._rolling = Rolling(specs, self.states, self._keeping, pace, room_for, place_for)

    def watched(self) -> tuple[Watched, ...]:
        return tuple(self.states.watched.values())

    def orders(self) -> tuple[ShardSpec, ...]:
        """With which the shards run, or are launched next."""
        return tuple(self.states.specs.values())

    @property
    def roll(self) -> Roll:
        return self._rolling.roll

    @property
    def told(self) -> asyncio.Event:
        """Set when `roll` has changed."""
        return self._rolling.told

    async def run(self) -> None:
        """Until cancelled.  Raises ConfigError, in a group, when a shard can never start."""
        found = await self._running()
        async with asyncio.TaskGroup() as group:
            self._keeping.start(group)
            self._adopt(found)
            self._rolling.ask()
            group.create_task(self._rolling.run(), name="roll")

    async def _running(self) -> Mapping[str, Running]:
        """What runs cannot be told while an engine is away: then nothing is launched twice, but waited."""
        while True:
            try:
                return await self._launcher.running()
            except (ShardError, Unreachable) as error:
                log.warning("shards_not_listed", error=str(error))
                await asyncio.sleep(AWAY_S)

    def want(self, orders: Sequence[ShardSpec], wish: str = "") -> None:
        """Other shards from now on.  Raises ConfigError for two of one name, or for none."""
        if not orders:
            raise ConfigError("A deployment needs at least one shard.")
        self._rolling.want(_checked(orders), wish)

    def drain(self) -> None:
        """Send nothing new to any shard."""
        for shard in self.states.watched:
            self.states.note(shard, Drained())

    def closed(self) -> None:
        """The launcher has stopped everything."""
        for shard in self.states.watched:
            self.states.note(shard, Exited())

    def _adopt(self, found: Mapping[str, Running]) -> None:
        """What runs goes on, whatever is wanted; what is missing is launched."""
        wanted = self._rolling.wanted
        orders = _orders_of(found, wanted)
        kept = {one.order.shard: one.order for one in match(wanted, list(orders.values())).keep}
        launched = {order.shard: order for order in missing(wanted, list(orders.values()))}
        for shard in self.states.specs.keys() - orders.keys() - launched.keys():
            self.states.remove(shard)
        self._keeping.adopted |= any(not found[shard].observed for shard in orders)
        for shard, order in orders.items():
            self._keeping.begin(kept.get(shard, order), found[shard])
        for order in launched.values():
            self._keeping.begin(order)


def _orders_of(found: Mapping[str, Running], wanted: Sequence[ShardSpec]) -> dict[str, ShardSpec]:
    """By name, of what runs: where the launcher cannot tell, that of the same name is wanted and stands."""
    named = {order.shard: order for order in wanted}
    orders = {}
    for shard, running in found.items():
        order = named.get(shard) if running.observed or running.order is None else running.order
        if order is None:
            log.warning("shard_unknown", shard=shard, url=running.url)
        else:
            orders[shard] = order
    return orders


def _checked(specs: Sequence[ShardSpec]) -> Sequence[ShardSpec]:
    names = [spec.shard for spec in specs]
    if len(set(names)) != len(names):
        raise ConfigError("Two shards of the deployment have the same name.")
    return specs
