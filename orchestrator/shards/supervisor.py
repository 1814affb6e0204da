"""Keeps the shards of a deployment running: launch, poll, notice the end, launch again.

One task per shard; `core.shard` says what an observation means.  Shards outlive the task: a conductor
that leads again finds them through the launcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from orchestrator.core.shard import (
    Answered,
    Drained,
    Exited,
    Launched,
    Missed,
    Observation,
    Rules,
    ShardState,
    Watched,
    backoff_s,
    observe,
    stranger,
)
from orchestrator.errors import ConfigError, ShardError
from orchestrator.shards.launcher import Exit, Launcher, Running
from orchestrator.shards.probe import StatusProbe
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

CRASH_LOOP = 3
"""Quick ends in a row that are worth a sentence to the user."""
LOG_LINES = 5
"""Of a shard's log, in that sentence."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Periods and deadlines of the conductor's work on shards, in seconds."""

    poll_s: float = 0.5
    probe_deadline_s: float = 2.0
    grace_s: float = 5.0
    """Between asking a shard to stop and forcing it."""
    drain_s: float = 5.0
    """How long running requests may go on when everything stops."""
    replace_s: float = 120.0
    """How long they may go on when one shard asks to be started again."""


UntilIdle = Callable[[str, int], Awaitable[None]]
"""Takes shard and epoch; returns once nothing is reserved on that incarnation."""


async def _at_once(_shard: str, _epoch: int) -> None:
    return


class Supervisor:
    """`changed` is set when a state changed, `ready` while every shard is ready."""

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ShardSpec],
        probe: StatusProbe,
        *,
        until_idle: UntilIdle = _at_once,
        rules: Rules | None = None,
        pace: Pace | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [spec.shard for spec in specs]
        if len(set(names)) != len(names):
            raise ConfigError("Two shards of the deployment have the same name.")
        self.changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.problems: dict[str, str] = {}
        """One sentence per shard that does not run as it should."""
        self.gone: set[tuple[str, int]] = set()
        """Incarnations that ended and may still have reservations; the conductor empties it."""
        self.pids: dict[str, int | None] = {}
        self._launcher = launcher
        self._specs = {spec.shard: spec for spec in specs}
        self._probe = probe
        self._until_idle = until_idle
        self._replaced: dict[str, str] = {}
        """Why a shard was stopped, until it is launched again."""
        self._replacing = ""
        """The one shard that is drained and started again now: the others serve meanwhile."""
        self._observed: set[str] = set()
        """Shards that somebody else keeps."""
        self._rules = rules or Rules()
        self._pace = pace or Pace()
        self._now = now
        self._watched = {spec.shard: Watched(spec.shard, spec.role) for spec in specs}

    def watched(self) -> tuple[Watched, ...]:
        return tuple(self._watched.values())

    async def run(self) -> None:
        """Until cancelled.  Raises ConfigError, in a group, when a shard can never start."""
        found = await self._launcher.running()
        async with asyncio.TaskGroup() as group:
            for spec in self._specs.values():
                group.create_task(self._keep(spec, found.get(spec.shard)), name=f"keep {spec.shard}")

    def drain(self) -> None:
        """Send nothing new to any shard."""
        for shard in self._watched:
            self._note(shard, Drained())

    def closed(self) -> None:
        """The launcher has stopped everything."""
        for shard in self._watched:
            self._note(shard, Exited())

    # --- one shard ------------------------------------------------------------------------------

    async def _keep(self, spec: ShardSpec, running: Running | None) -> None:
        while True:
            how = "not started"
            running = running or await self._launch(spec)
            if running is not None:
                ended = await self._watch(running)
                if self._cannot_start(spec.shard, ended):
                    return
                reason = self._replaced.pop(spec.shard, "")
                running, how = None, f"it asked for it: {reason}" if reason else str(ended)
                if not reason:
                    self._is_replaced(spec.shard)
            else:
                self._is_replaced(spec.shard)
            await self._back_off(spec.shard, how)

    async def _launch(self, spec: ShardSpec) -> Running | None:
        try:
            running = await self._launcher.launch(spec)
        except ShardError as error:
            log.warning("shard_not_launched", shard=spec.shard, error=str(error))
            self._note(spec.shard, Launched(""))
            self._note(spec.shard, Exited())
            return None
        log.info("shard_launched", shard=spec.shard, role=spec.role, url=running.url, pid=running.pid)
        return running

    async def _watch(self, running: Running) -> Exit:
        """Poll it until it exits; for ever, where somebody else keeps it."""
        shard = running.shard
        self.pids[shard] = running.pid
        if running.observed:
            self._observed.add(shard)
        known = self._watched[shard]
        if known.url != running.url or known.state is ShardState.DEAD:
            self._note(shard, Launched(running.url, running.sidecar_url, running.pull_host))
        async with asyncio.TaskGroup() as group:
            poll = self._observe if running.observed else self._poll
            polling = group.create_task(poll(shard))
            ended = await self._launcher.wait(shard)
            polling.cancel()
        self.pids[shard] = None
        self._note(shard, Exited())
        log.warning("shard_exited", shard=shard, how=str(ended), last_line=ended.last_line)
        return ended

    async def _poll(self, shard: str) -> None:
        """Ends when the shard is given up or asks to be replaced; stopping it then makes it exit."""
        while self._watched[shard].state is not ShardState.DEAD:
            seen = await self._ask(shard)
            # Before the answer counts: one that has just come back lets the others go first.
            others_serve = not self._replacing
            self._note(shard, seen)
            if isinstance(seen, Answered) and seen.status.relaunch and others_serve:
                self._replacing = shard
                await self._drained(shard, seen.status.relaunch)
                break
            await asyncio.sleep(self._pace.poll_s)
        else:
            log.warning("shard_silent", shard=shard)
        await self._launcher.stop(shard, self._pace.grace_s)

    async def _drained(self, shard: str, reason: str) -> None:
        """Nothing new is sent to it, and what runs there may end, for a while."""
        epoch = self._watched[shard].epoch
        self._problem(shard, f"Shard {shard} is started again once its requests are done: {reason}")
        self._note(shard, Drained())
        in_time = True
        try:
            async with asyncio.timeout(self._pace.replace_s):
                await self._until_idle(shard, epoch)
        except TimeoutError:
            in_time = False
        log.warning("shard_relaunched", shard=shard, epoch=epoch, reason=reason, requests_done=in_time)
        self._replaced[shard] = reason

    def _is_replaced(self, shard: str) -> None:
        """It is there again, or cannot come back for now: the next one may go."""
        if self._replacing == shard:
            self._replacing = ""

    async def _observe(self, shard: str) -> None:
        """Poll a shard that somebody else keeps: nothing is done to it, whatever it answers."""
        while True:
            seen = await self._ask(shard)
            if isinstance(seen, Answered):
                self._heard(shard, seen)
            else:
                self._note(shard, seen)
                known = self._watched[shard]
                if known.state is not ShardState.READY:
                    self._problem(shard, f"Shard {shard}, which is kept elsewhere, is silent at {known.url}.")
            await asyncio.sleep(self._pace.poll_s)

    def _heard(self, shard: str, seen: Answered) -> None:
        known, status = self._watched[shard], seen.status
        if strange := stranger(status, self._specs[shard]):
            self._note(shard, Missed())
            self._problem(shard, f"At {known.url}, which is to be shard {shard}, {strange}.")
            return
        if known.epoch not in (0, status.epoch):
            # Somebody started it anew: what its predecessor was told to do is over.
            self._note(shard, Launched(known.url, known.sidecar_url, known.pull_host))
        self._note(shard, seen)
        if status.relaunch:
            self._note(shard, Drained())
            self._problem(shard, f"Shard {shard} gets nothing new until it is restarted: {status.relaunch}")

    async def _ask(self, shard: str) -> Observation:
        known = self._watched[shard]
        try:
            async with asyncio.timeout(self._pace.probe_deadline_s):
                return Answered(await self._probe(known.sidecar_url or known.url))
        except (ShardError, TimeoutError):
            return Missed()

    def _problem(self, shard: str, sentence: str) -> None:
        if self.problems.get(shard) != sentence:
            self.problems[shard] = sentence
            self.changed.set()

    def _cannot_start(self, shard: str, ended: Exit) -> bool:
        """True for a shard that ran once and now refuses its input; ConfigError if it never ran."""
        if not ended.bad_input:
            return False
        sentence = f"Shard {shard} cannot start: {ended.last_line or 'it refuses its input.'}"
        if self._watched[shard].status is None:
            raise ConfigError(sentence)
        self._problem(shard, sentence)
        self._is_replaced(shard)
        log.error("shard_given_up", shard=shard, problem=sentence)
        return True

    async def _back_off(self, shard: str, how: str) -> None:
        failures = self._watched[shard].failures
        wait_s = backoff_s(failures, self._rules)
        sentence = f"Shard {shard} ended ({how}) and is started again in {wait_s:g} s."
        if failures >= CRASH_LOOP:
            tail = " | ".join(await self._launcher.logs(shard, LOG_LINES)) or "(empty)"
            sentence = (
                f"Shard {shard} ended {failures} times in a row ({how}); the next start is in {wait_s:g} s. "
                f"Its log ends: {tail}"
            )
            log.error("shard_crash_loop", shard=shard, failures=failures, wait_s=wait_s)
        self._problem(shard, sentence)
        await asyncio.sleep(wait_s)

    def _note(self, shard: str, observation: Observation) -> None:
        before = self._watched[shard]
        rules = self._rules.for_observed() if shard in self._observed else self._rules
        after = self._watched[shard] = observe(before, observation, self._now(), rules)
        if before.epoch and (after.epoch != before.epoch or after.state is ShardState.DEAD):
            self.gone.add((shard, before.epoch))
        if (after.state, after.epoch) == (before.state, before.epoch):
            return
        if after.state is ShardState.READY:
            self.problems.pop(shard, None)
            self._is_replaced(shard)
        took_s = self._now() - after.launched_s
        log.info("shard_state", shard=shard, state=after.state, epoch=after.epoch, took_s=round(took_s, 3))
        if all(watched.state is ShardState.READY for watched in self._watched.values()):
            self.ready.set()
        else:
            self.ready.clear()
        self.changed.set()
