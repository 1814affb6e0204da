"""The life of each shard that is kept: launch, poll, notice the end, launch again; or let it go.

One task per shard; `core.shard` says what an observation means.  Never two at once for one name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from orchestrator.core.shard import (
    Answered,
    Drained,
    Exited,
    GivenBack,
    Launched,
    Missed,
    Observation,
    ShardState,
    backoff_s,
    stranger,
)
from orchestrator.errors import ConfigError, ShardError, Unreachable
from orchestrator.shards.launcher import Exit, Launcher, Running
from orchestrator.shards.probe import StatusProbe
from orchestrator.shards.states import States
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
    start_poll_s: float = 0.1
    """Of a shard that has not answered yet."""
    probe_deadline_s: float = 2.0
    grace_s: float = 5.0
    """Between asking a shard to stop and forcing it."""
    drain_s: float = 5.0
    """How long running requests may go on when everything stops."""
    replace_s: float = 120.0
    """How long they may go on when one shard is started again or replaced."""
    ready_s: float = 900.0
    """How long a new shard may take until it is ready, before a roll is given up."""
    proof_s: float = 2.0
    """How long it must stay ready before an old one goes: it may crash at its first request."""


UntilIdle = Callable[[str, int], Awaitable[None]]
"""Takes shard and epoch; returns once nothing is reserved on that incarnation."""


class Keeping:
    """`begin` and `retire` are for a shard at a time; tasks end with the group that they were begun in."""

    def __init__(
        self, states: States, launcher: Launcher, probe: StatusProbe, until_idle: UntilIdle, pace: Pace
    ) -> None:
        self.failed: dict[str, str] = {}
        """Why a shard on trial ended."""
        self.adopted = False
        """Some shards were there before: that one cannot start is no reason to end all."""
        self._states = states
        self._launcher = launcher
        self._probe = probe
        self._until_idle = until_idle
        self._pace = pace
        self._trials: set[str] = set()
        """New shards that are not launched again if they end."""
        self._found: set[str] = set()
        """Shards that ran before this term, and have not exited in it."""
        self._replaced: dict[str, str] = {}
        """Why a shard was stopped, until it is launched again."""
        self._replacing = ""
        """The one shard that is drained now: the others serve meanwhile."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, asyncio.Event] = {}
        self._group: asyncio.TaskGroup | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        """A new term: nothing is kept yet."""
        self._group = group
        self._tasks.clear()
        self._trials.clear()
        self._found.clear()
        self._replacing = ""
        self._states.leaving.clear()

    def begin(self, spec: ShardSpec, running: Running | None = None, *, trial: bool = False) -> None:
        """Keep a shard, found or launched now; one on `trial` is not launched a second time."""
        shard = spec.shard
        assert self._group is not None, "not started"
        assert shard not in self._tasks, f"{shard} is kept already"
        self._states.add(spec)
        self._left[shard] = asyncio.Event()
        self.failed.pop(shard, None)
        if trial:
            self._trials.add(shard)
        if running is not None:
            self._found.add(shard)
        if running is not None and shard not in self._states.held:
            # Whatever an earlier term had drained it for begins anew.
            self._states.note(shard, GivenBack())
        self._tasks[shard] = self._group.create_task(self._keep(shard, running), name=f"keep {shard}")

    def proved(self, shard: str) -> None:
        """Its trial is over: it is kept like any other."""
        self._trials.discard(shard)

    def ended(self, shard: str) -> bool:
        """It is not kept any more: its trial failed, or it can never start."""
        return self._tasks[shard].done()

    async def retire(self, shard: str, why: str) -> bool:
        """Nothing new is sent to it, its requests may end, then it is stopped; whether they were done.

        Never while another shard is drained.
        """
        while self._replacing not in ("", shard):  # noqa: ASYNC110 - for many reasons it may end
            await asyncio.sleep(self._pace.poll_s)
        self._replacing = shard
        self._states.leaving.add(shard)
        self._states.problem(shard, why)
        self._states.note(shard, Drained())
        done = shard in self._states.observed or await self._idle(shard)
        await self.dismiss(shard)
        return done

    async def dismiss(self, shard: str) -> None:
        """Stop it at once and forget it."""
        self._states.leaving.add(shard)
        self._left[shard].set()
        task = self._tasks[shard]
        if shard in self._states.observed:
            task.cancel()
        over = False
        while not over:
            # Also one that has ended by itself: what is left of it is removed.
            over = await self._stopped(shard) and task.done()
            # A launch that was under way when it was told to leave ends only now.
            await asyncio.wait({task}, timeout=self._pace.poll_s)
        del self._tasks[shard], self._left[shard]
        self._trials.discard(shard)
        self._is_replaced(shard)
        self._states.remove(shard)

    # --- one shard ------------------------------------------------------------------------------

    async def _keep(self, shard: str, running: Running | None) -> None:
        while shard not in self._states.leaving:
            launched = running or await self._launch(shard)
            if isinstance(launched, Running):
                ended = await self._watch(launched)
                reason = self._replaced.pop(shard, "")
                how = f"it asked for it: {reason}" if reason else str(ended)
                word = ended.last_line
                if self._is_over(shard, ended):
                    return
            else:
                reason, how, word = "", launched, ""
                if shard in self._trials:
                    self.failed[shard] = how
                    return
            if not reason:
                self._is_replaced(shard)
            running = None
            await self._back_off(shard, how, word)

    def _is_over(self, shard: str, ended: Exit) -> bool:
        """It shall not be launched again.  Raises ConfigError where all shall end."""
        if shard in self._states.leaving:
            return True
        if shard in self._trials:
            self.failed[shard] = f"it ended ({ended}): {ended.last_line}" if ended.last_line else str(ended)
            return True
        return self._cannot_start(shard, ended)

    async def _launch(self, shard: str) -> Running | str:
        """What runs, or why nothing does."""
        spec = self._states.specs[shard]
        try:
            running = await self._launcher.launch(spec)
        except (ShardError, ConfigError) as error:
            if isinstance(error, ConfigError) and self._ends_all(shard):
                raise
            log.warning("shard_not_launched", shard=shard, error=str(error))
            self._note(shard, Launched(""))
            self._note(shard, Exited())
            return str(error).rstrip(".")
        log.info("shard_launched", shard=shard, role=spec.role, url=running.url, pid=running.pid)
        return running

    async def _watch(self, running: Running) -> Exit:
        """Poll it until it exits; for ever, where somebody else keeps it."""
        shard, states = running.shard, self._states
        states.pids[shard] = running.pid
        if running.observed:
            states.observed.add(shard)
        known = states.watched[shard]
        if known.url != running.url or known.state is ShardState.DEAD:
            states.launched(running.shard, Launched(running.url, running.sidecar_url, running.pull_host))
        async with asyncio.TaskGroup() as group:
            poll = self._observe if running.observed else self._poll
            polling = group.create_task(poll(shard))
            ended = await self._launcher.wait(shard)
            polling.cancel()
        states.pids[shard] = None
        self._found.discard(shard)
        self._note(shard, Exited())
        log.warning("shard_exited", shard=shard, how=str(ended), last_line=ended.last_line)
        return ended

    async def _poll(self, shard: str) -> None:
        """Ends when the shard is given up or asks to be replaced; stopping it then makes it exit."""
        while self._states.watched[shard].state is not ShardState.DEAD:
            seen = await self._ask(shard)
            # Before the answer counts: one that has just come back lets the others go first.
            others_serve = not self._replacing
            self._note(shard, seen)
            if isinstance(seen, Answered) and seen.status.relaunch and others_serve:
                self._replacing = shard
                await self._drained(shard, seen.status.relaunch)
                break
            starting = self._states.watched[shard].state is ShardState.STARTING
            await asyncio.sleep(self._pace.start_poll_s if starting else self._pace.poll_s)
        else:
            log.warning("shard_silent", shard=shard)
        while not await self._stopped(shard):  # noqa: ASYNC110
            await asyncio.sleep(self._pace.poll_s)

    async def _stopped(self, shard: str) -> bool:
        """False where it could not be done now: whoever runs the shards may be away."""
        try:
            await self._launcher.stop(shard, self._pace.grace_s)
        except (ShardError, Unreachable) as error:
            log.warning("shard_not_stopped", shard=shard, error=str(error))
            return False
        return True

    async def _drained(self, shard: str, reason: str) -> None:
        """Nothing new is sent to it, and what runs there may end, for a while."""
        epoch = self._states.watched[shard].epoch
        sentence = f"Shard {shard} is started again once its requests are done: {reason}"
        self._states.problem(shard, sentence)
        self._note(shard, Drained())
        in_time = await self._idle(shard)
        log.warning("shard_relaunched", shard=shard, epoch=epoch, reason=reason, requests_done=in_time)
        self._replaced[shard] = reason

    async def _idle(self, shard: str) -> bool:
        """False where requests go on after `replace_s`."""
        try:
            async with asyncio.timeout(self._pace.replace_s):
                while shard in self._found and not self._states.watched[shard].epoch:  # noqa: ASYNC110
                    # Its requests are those of an incarnation that it has not named to us yet.
                    await asyncio.sleep(self._pace.poll_s / 5)
                await self._until_idle(shard, self._states.watched[shard].epoch)
        except TimeoutError:
            return False
        return True

    def _is_replaced(self, shard: str) -> None:
        """It is there again, or cannot come back for now: the next one may go."""
        if self._replacing == shard:
            self._replacing = ""

    async def _observe(self, shard: str) -> None:
        """Poll a shard that somebody else keeps: nothing is done to it, whatever it answers."""
        states = self._states
        while True:
            seen = await self._ask(shard)
            if isinstance(seen, Answered):
                self._heard(shard, seen)
            else:
                self._note(shard, seen)
                known = states.watched[shard]
                if known.state is not ShardState.READY:
                    states.problem(
                        shard, f"Shard {shard}, which is kept elsewhere, is silent at {known.url}."
                    )
            await asyncio.sleep(self._pace.poll_s)

    def _heard(self, shard: str, seen: Answered) -> None:
        states, status = self._states, seen.status
        known = states.watched[shard]
        if strange := stranger(status, states.specs[shard]):
            self._note(shard, Missed())
            states.problem(shard, f"At {known.url}, which is to be shard {shard}, {strange}.")
            return
        if known.epoch not in (0, status.epoch):
            # Somebody started it anew: what its predecessor was told to do is over.
            states.launched(shard, Launched(known.url, known.sidecar_url, known.pull_host))
        self._note(shard, seen)
        if status.relaunch:
            self._note(shard, Drained())
            states.problem(shard, f"Shard {shard} gets nothing new until it is restarted: {status.relaunch}")

    async def _ask(self, shard: str) -> Observation:
        known = self._states.watched[shard]
        try:
            async with asyncio.timeout(self._pace.probe_deadline_s):
                return Answered(await self._probe(known.sidecar_url or known.url))
        except (ShardError, TimeoutError):
            return Missed()

    def _note(self, shard: str, observation: Observation) -> None:
        before = self._states.watched[shard].state
        self._states.note(shard, observation)
        after = self._states.watched[shard].state
        back = after is ShardState.READY and before is not after
        held = shard in self._states.held and shard not in self._states.leaving
        if back or (held and isinstance(observation, Answered)):
            self._is_replaced(shard)

    def _ends_all(self, shard: str) -> bool:
        """That it cannot start is found with the first start of all."""
        first = not self.adopted and shard not in self._trials
        return first and self._states.watched[shard].status is None

    def _cannot_start(self, shard: str, ended: Exit) -> bool:
        """True for a shard that now refuses its input; ConfigError if nothing ever ran."""
        if not ended.bad_input:
            return False
        sentence = f"Shard {shard} cannot start: {ended.last_line or 'it refuses its input.'}"
        if self._ends_all(shard):
            raise ConfigError(sentence)
        self._states.problem(shard, sentence)
        self._is_replaced(shard)
        log.error("shard_given_up", shard=shard, problem=sentence)
        return True

    async def _back_off(self, shard: str, how: str, word: str) -> None:
        """Less when it is to leave.  `word` is the last one on its end, which need not be in its log."""
        failures = self._states.watched[shard].failures
        wait_s = backoff_s(failures, self._states.rules)
        sentence = f"Shard {shard} ended ({how}) and is started again in {wait_s:g} s."
        if failures >= CRASH_LOOP:
            lines = await self._launcher.logs(shard, LOG_LINES)
            tail = " | ".join([*lines, word] if word and word not in lines else lines) or "(empty)"
            sentence = (
                f"Shard {shard} ended {failures} times in a row ({how}); the next start is in {wait_s:g} s. "
                f"Its log ends: {tail}"
            )
            log.error("shard_crash_loop", shard=shard, failures=failures, wait_s=wait_s)
        self._states.problem(shard, sentence)
        try:
            async with asyncio.timeout(wait_s):
                await self._left[shard].wait()
        except TimeoutError:
            pass
