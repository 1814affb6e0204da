"""Keeps the shards of a deployment running: launch, poll, notice the end, launch again.

One task per shard; `core.shard` says what an observation means.  Shards outlive the task: a conductor
that leads again finds them through the launcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
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


class Supervisor:
    """`changed` is set when a state changed, `ready` while every shard is ready."""

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ShardSpec],
        probe: StatusProbe,
        *,
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
        self._specs = tuple(specs)
        self._probe = probe
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
            for spec in self._specs:
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
                running, how = None, str(ended)
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
        """Poll it until it exits."""
        shard = running.shard
        self.pids[shard] = running.pid
        known = self._watched[shard]
        if known.url != running.url or known.state is ShardState.DEAD:
            self._note(shard, Launched(running.url))
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(self._poll(shard))
            ended = await self._launcher.wait(shard)
            polling.cancel()
        self.pids[shard] = None
        self._note(shard, Exited())
        log.warning("shard_exited", shard=shard, how=str(ended), last_line=ended.last_line)
        return ended

    async def _poll(self, shard: str) -> None:
        """Ends when the shard is given up; stopping it then makes it exit."""
        while self._watched[shard].state is not ShardState.DEAD:
            self._note(shard, await self._ask(self._watched[shard].url))
            await asyncio.sleep(self._pace.poll_s)
        log.warning("shard_silent", shard=shard)
        await self._launcher.stop(shard, self._pace.grace_s)

    async def _ask(self, url: str) -> Observation:
        try:
            async with asyncio.timeout(self._pace.probe_deadline_s):
                return Answered(await self._probe(url))
        except (ShardError, TimeoutError):
            return Missed()

    def _cannot_start(self, shard: str, ended: Exit) -> bool:
        """True for a shard that ran once and now refuses its input; ConfigError if it never ran."""
        if not ended.bad_input:
            return False
        sentence = f"Shard {shard} cannot start: {ended.last_line or 'it refuses its input.'}"
        if self._watched[shard].status is None:
            raise ConfigError(sentence)
        self.problems[shard] = sentence
        log.error("shard_given_up", shard=shard, problem=sentence)
        self.changed.set()
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
        self.problems[shard] = sentence
        self.changed.set()
        await asyncio.sleep(wait_s)

    def _note(self, shard: str, observation: Observation) -> None:
        before = self._watched[shard]
        after = self._watched[shard] = observe(before, observation, self._now(), self._rules)
        if before.epoch and (after.epoch != before.epoch or after.state is ShardState.DEAD):
            self.gone.add((shard, before.epoch))
        if (after.state, after.epoch) == (before.state, before.epoch):
            return
        if after.state is ShardState.READY:
            self.problems.pop(shard, None)
        took_s = self._now() - after.launched_s
        log.info("shard_state", shard=shard, state=after.state, epoch=after.epoch, took_s=round(took_s, 3))
        if all(watched.state is ShardState.READY for watched in self._watched.values()):
            self.ready.set()
        else:
            self.ready.clear()
        self.changed.set()
