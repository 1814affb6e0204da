"""Carries out, one at a time, the steps from the shards that run to those that are wanted.

asked -> [ step -> carried out ] until nothing is left: done; or until one fails: what runs then goes on
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from orchestrator.core.roll import Roll, RollState
from orchestrator.core.rolling import (
    Launch,
    Member,
    Retire,
    Step,
    Wait,
    conflict,
    match,
    step,
    victims_most,
)
from orchestrator.core.shard import ShardState
from orchestrator.errors import ConfigError, ShardError, Unreachable
from orchestrator.shards.keeping import Keeping, Pace
from orchestrator.shards.states import States
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

RoomFor = Callable[[ShardSpec], str | Awaitable[str]]
"""Takes an order; why it cannot be launched beside all that runs now, in words, or empty."""


PlaceFor = Callable[[ShardSpec], ShardSpec | Awaitable[ShardSpec]]
"""Takes an order; the same where there is most room for it now."""


def always_room(_order: ShardSpec) -> str:
    return ""


def as_planned(order: ShardSpec) -> ShardSpec:
    return order


class Rolling:
    """`told` is set when `roll` has changed."""

    def __init__(
        self,
        wanted: Sequence[ShardSpec],
        states: States,
        keeping: Keeping,
        pace: Pace,
        room_for: RoomFor = always_room,
        place_for: PlaceFor = as_planned,
    ) -> None:
        self.wanted = tuple(wanted)
        self.roll = Roll()
        self.told = asyncio.Event()
        self._states = states
        self._keeping = keeping
        self._room_for = room_for
        self._place_for = place_for
        self._pace = pace
        self._asked = asyncio.Event()
        self._made_room: list[ShardSpec] = []
        """Orders of shards that went so that a new one can be launched, until that is ready."""

    def want(self, orders: Sequence[ShardSpec], wish: str) -> None:
        """From now on; a step under way is ended first, the start of a new shard is given up."""
        self.wanted = tuple(orders)
        self._say(Roll(wish, RollState.ROLLING, "Comparing with what runs"))
        self._asked.set()

    def ask(self) -> None:
        """Compare with what runs, unless that has failed already."""
        if self.roll.state is not RollState.FAILED:
            self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._follow()

    def fleet(self) -> list[Member]:
        """What runs, or is to run; a shard that others keep is what it is wanted to be."""
        states = self._states
        wanted = {order.shard: order for order in self.wanted}
        members = []
        for shard, spec in states.specs.items():
            order = wanted.get(shard, spec) if shard in states.observed else spec
            ready = states.watched[shard].state is ShardState.READY
            members.append(Member(order, ready=ready, held=shard in states.held))
        return members

    # --- one wish -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        self._say(Roll(self.roll.id, RollState.ROLLING))
        self._made_room.clear()
        while not self._asked.is_set():
            fleet = self.fleet()
            next_step = step(self.wanted, fleet)
            if next_step is None:
                self._say(replace(self.roll, state=RollState.DONE, doing=""))
                if self.roll.done:
                    log.info("roll_done", wish=self.roll.id, steps=len(self.roll.done))
                return
            self._keeping.adopted = True
            if problem := await self._carried_out(next_step, [member.order for member in fleet]):
                self._fail(problem)
                return
        self._restore()

    async def _carried_out(self, next_step: Step, running: Sequence[ShardSpec]) -> str:
        """Empty, or why the roll ends here."""
        match next_step:
            case Wait(shard):
                self._say(replace(self.roll, doing=f"Waiting until shard {shard} is ready"))
                why = await self._late(shard)
                return why and f"Shard {shard} is not ready, and no other one may go before it is: {why}."
            case Retire(shard):
                await self._retired(shard, f"Shard {shard} is stopped once its requests are done.")
                return ""
            case Launch(order, instead):
                return await self._launched(order, instead, running)

    async def _launched(self, order: ShardSpec, instead: str, running: Sequence[ShardSpec]) -> str:
        order = await self._at_a_place(order)
        no_room = conflict(order, running) or await self._no_room(order)
        if not no_room:
            return await self._proved(order)
        victim = next((one for one in running if one.shard == instead), None)
        if victim is None or len(self._made_room) >= victims_most(order, victim):
            return f"There is no room for shard {order.shard}: {no_room}."
        self._made_room.append(victim)
        why = f"Shard {instead} makes room for its successor once its requests are done: {no_room}."
        await self._retired(instead, why)
        return ""

    async def _at_a_place(self, order: ShardSpec) -> ShardSpec:
        try:
            placed = self._place_for(order)
            return await placed if inspect.isawaitable(placed) else placed
        except (ConfigError, ShardError, Unreachable) as error:
            log.warning("place_not_found", shard=order.shard, error=str(error))
            return order

    async def _no_room(self, order: ShardSpec) -> str:
        try:
            told = self._room_for(order)
            text = await told if inspect.isawaitable(told) else told
        except (ConfigError, ShardError, Unreachable) as error:
            text = str(error)
        return str(text).rstrip(".")

    async def _proved(self, order: ShardSpec) -> str:
        """Launch it and wait until it serves; it is gone again where it does not."""
        shard = order.shard
        self._say(replace(self.roll, doing=f"Starting shard {shard}"))
        self._keeping.begin(order, trial=True)
        why = await self._late(shard)
        if not why:
            self._keeping.proved(shard)
            self._made_room.clear()
            self._did(f"Shard {shard} is ready")
            return ""
        await self._keeping.dismiss(shard)
        return "" if self._asked.is_set() else f"Shard {shard} did not get ready: {why.rstrip('.')}."

    async def _retired(self, shard: str, why: str) -> None:
        self._say(replace(self.roll, doing=f"Draining shard {shard}"))
        done = await self._keeping.retire(shard, why)
        late = "" if done else f", with requests that had gone on for {self._pace.replace_s:g} s"
        self._did(f"Shard {shard} is stopped{late}")

    async def _late(self, shard: str) -> str:
        """Returns once it is ready and stays so for a while; else why it will not be."""
        clock, since_s = asyncio.get_running_loop().time, None
        try:
            async with asyncio.timeout(self._pace.ready_s):
                while since_s is None or clock() < since_s + self._pace.proof_s:
                    if self._keeping.ended(shard):
                        return self._keeping.failed.get(shard, "it cannot start")
                    if self._asked.is_set():
                        return "something else is wanted now"
                    if shard in self._states.held:
                        return ""  # as ready as it is meant to be
                    ready = self._states.watched[shard].state is ShardState.READY
                    since_s = (since_s or clock()) if ready else None
                    await asyncio.sleep(self._pace.poll_s / 5)
        except TimeoutError:
            return f"it was not ready within {self._pace.ready_s:g} s"
        return ""

    # --- how it ends ----------------------------------------------------------------------------

    def _fail(self, problem: str) -> None:
        """What made room comes back as it was; the others say why they stay."""
        self._restore()
        for shard in match(self.wanted, [member.order for member in self.fleet()]).retire:
            self._states.problem(shard, f"Shard {shard} stays as it was. {problem}")
        log.error("roll_failed", wish=self.roll.id, problem=problem)
        self._say(replace(self.roll, state=RollState.FAILED, doing="", problem=problem))

    def _restore(self) -> None:
        for order in self._made_room:
            self._keeping.begin(order)
        self._made_room.clear()

    def _did(self, sentence: str) -> None:
        log.info("roll_step", wish=self.roll.id, did=sentence)
        self._say(replace(self.roll, doing="", done=(*self.roll.done, f"{sentence}.")))

    def _say(self, roll: Roll) -> None:
        self.roll = roll
        self.told.set()
