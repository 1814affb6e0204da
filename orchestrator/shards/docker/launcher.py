"""Shards as containers of one engine.  The engine remembers them: whoever comes next finds them by label.

created -> secrets copied in -> GPUs still ours? -> started -> ended -> removed
No container starts by itself: the conductor alone decides, and `may_act` asks whether it still leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError, ShardError, Unreachable
from orchestrator.shards.docker.container import Bind, Ground
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.ground import GroundWork
from orchestrator.shards.docker.listing import Found, containers_of, exit_of, lines_of, removed
from orchestrator.shards.docker.names import USER, network_name
from orchestrator.shards.docker.secrets import owner_of
from orchestrator.shards.docker.start import Start
from orchestrator.shards.docker.watch import AWAY_S, Watch
from orchestrator.shards.launcher import Exit, Running
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

AWAY_LIMIT_S = 120.0
"""How long stopping a shard waits for an engine that is away: it may be restarted meanwhile."""
KILL_S = 20.0
"""For the kernel to end what was killed."""
REMOVED = 137
"""Exit code of a container that somebody removed while it ran: the engine kills it first."""
KEPT_LINES = 200
"""Of the log of a container that was removed."""


@dataclass(frozen=True, slots=True)
class _Past:
    """What is left of a container that this launcher removed."""

    exit: Exit
    lines: tuple[str, ...] = ()


class DockerLauncher:
    """See `Launcher`.  Shards outlive this process."""

    def __init__(
        self,
        engine: Engine,
        deployment: str,
        *,
        network: str,
        secrets: Mapping[str, bytes],
        mounts: Sequence[Bind],
        user: str = "",
        log_bytes: int,
        may_act: Callable[[], Awaitable[None]],
        arena_bytes: int = 0,
        gpu_aliases: Mapping[str, str] | None = None,
        owner: str = "",
    ) -> None:
        """`secrets` are the files of each container, by name; `user` is `uid:gid`, empty for the image's.

        `network`: a bridge, `host`, or empty for a bridge of the deployment's own.  `arena_bytes` is the
        size of the tmpfs, 0 for half of the host's memory.  `gpu_aliases`: UUIDs by index.  What has
        another `owner` is left alone; without one nobody is asked whose it is.
        """
        files = {name: value for name, value in secrets.items() if value}
        ground = Ground(
            deployment=deployment,
            network=network or network_name(deployment),
            mounts=tuple(mounts),
            secrets=frozenset(files),
            user=user,
            log_bytes=log_bytes,
            host_cpus=engine.facts.cpus,
            cdi=engine.facts.cdi,
            owner=owner,
        )
        user_ids = owner_of(user or f"{USER}:{USER}", "of the settings")
        self._engine = engine
        self._deployment = deployment
        self._owner = owner
        self._may_act = may_act
        self._ground_work = GroundWork(engine, ground, user_ids, arena_bytes, may_act)
        self._start = Start(engine, ground, self._ground_work, files, gpu_aliases or {}, may_act)
        self._watch = Watch(engine, deployment)
        self._launching: set[str] = set()
        self._launched: set[str] = set()
        """By this object: what `roll_back` takes back."""
        self._past: dict[str, _Past] = {}
        self.strangers: tuple[str, ...] = ()
        """Names of containers that carry the deployment's label and were not launched by us."""

    async def launch(self, spec: ShardSpec) -> Running:
        if not isinstance(spec, ShardOrder) or not spec.image:
            raise ConfigError(f"Shard {spec.shard} has no image to be launched from.")
        if spec.shard in self._launching:
            raise ShardError(f"Shard {spec.shard} is already running.")
        self._launching.add(spec.shard)
        try:
            found = await self._start.run(spec)
        except Unreachable as error:
            raise ShardError(str(error)) from None  # it did not start this time
        finally:
            self._launching.discard(spec.shard)
        self._past.pop(spec.shard, None)
        self._launched.add(spec.shard)
        return found.running

    async def running(self) -> Mapping[str, Running]:
        """Raises Unreachable where the engine does not tell."""
        return {found.shard: found.running for found in await self._ours() if found.alive and found.shard}

    async def wait(self, shard: str) -> Exit:
        """An engine that is away is waited for: it tells the exit when it is back."""
        mine: Found | None = None
        listed = await self._watch.now()
        while True:
            if listed is not None:
                found = _of(shard, self._known(listed))
                mine = mine or found
                # One of another id has been launched in its place meanwhile.
                if found is None or mine is None or found.id != mine.id or not found.alive:
                    ended = await self._exit(shard, mine)
                    if ended is not None:
                        return ended
            listed = await self._watch.next()

    async def stop(self, shard: str, grace_s: float) -> None:
        """Raises ShardError where the engine is away for long."""
        try:
            async with asyncio.timeout(grace_s + KILL_S + AWAY_LIMIT_S):
                while True:
                    try:
                        return await self._stop(shard, grace_s)
                    except Unreachable as error:
                        log.warning("engine_away", shard=shard, error=str(error))
                        await asyncio.sleep(AWAY_S)
        except TimeoutError:
            raise ShardError(
                f"Shard {shard} could not be stopped in time by the engine at {self._engine.host}."
            ) from None

    async def logs(self, shard: str, lines: int) -> list[str]:
        try:
            found = _of(shard, await self._ours())
            if found is not None:
                return await lines_of(self._engine, found, lines)
        except (ShardError, Unreachable) as error:
            log.warning("log_not_read", shard=shard, error=str(error))
        past = self._past.get(shard)
        return list(past.lines[-lines:]) if past and lines > 0 else []

    async def close(self, grace_s: float) -> None:
        """Then the arenas and the network as well, unless something else uses them."""
        ours = await self._ours()
        await self._end([found.shard for found in ours if found.shard], grace_s)
        for task in ours:
            if task.task:
                await self._remove(task)
        await self._ground_work.clear()

    async def roll_back(self, grace_s: float) -> None:
        """Remove what this object launched, and the ground unless others stand on it."""
        await self._end(sorted(self._launched), grace_s)
        await self._ground_work.clear()

    # --- ending ---------------------------------------------------------------------------------

    async def _end(self, shards: Iterable[str], grace_s: float) -> None:
        """All at the same time, also where one cannot be ended; then the first failure is raised."""
        ends = await asyncio.gather(*(self.stop(one, grace_s) for one in shards), return_exceptions=True)
        for failure in ends:
            if isinstance(failure, BaseException):
                raise failure

    async def _stop(self, shard: str, grace_s: float) -> None:
        found = _of(shard, await self._ours())
        if found is None:
            return
        if found.alive:
            await self._signal(found, "SIGTERM")
            try:
                async with asyncio.timeout(grace_s):
                    await self.wait(shard)
            except TimeoutError:
                log.warning("shard_killed", shard=shard, container=found.name, grace_s=grace_s)
                await self._signal(found, "SIGKILL")
                async with asyncio.timeout(KILL_S):
                    await self.wait(shard)
        lines: Sequence[str] = ()
        try:
            lines = await lines_of(self._engine, found, KEPT_LINES)
        except ShardError:
            pass  # a container without a log, or without itself, leaves none
        ended = await exit_of(self._engine, found) if found.state != "created" else None
        self._past[shard] = _Past(ended or Exit(shard, REMOVED), tuple(lines))
        await self._remove(found)

    async def _signal(self, found: Found, signal: str) -> None:
        await self._may_act()
        try:
            await self._engine.act(
                f"{found.name} was not signalled", lambda client: client.api.kill(found.id, signal)
            )
        except ShardError as error:
            log.info("signal_too_late", container=found.name, error=str(error))  # it has ended

    async def _remove(self, found: Found) -> None:
        await self._may_act()
        await removed(self._engine, found.id, found.name)
        self._launched.discard(found.shard)

    async def _exit(self, shard: str, found: Found | None) -> Exit | None:
        """None where the engine has just gone away."""
        if found is not None and found.state != "created":
            try:
                ended = await exit_of(self._engine, found)
            except (ShardError, Unreachable):
                return None
            if ended is not None:
                return ended
        if past := self._past.get(shard):
            return past.exit
        return Exit(shard, 0) if found is None else Exit(shard, REMOVED, "Its container was removed.")

    # --- what there is --------------------------------------------------------------------------

    async def _ours(self) -> list[Found]:
        return self._known(await containers_of(self._engine, self._deployment))

    def _known(self, listed: Sequence[Found]) -> list[Found]:
        """Without those that we did not launch, which are told once."""
        ours = [one for one in listed if not one.stranger and one.of(self._deployment, self._owner)]
        strangers = tuple(sorted(one.name for one in listed if one not in ours))
        if strangers != self.strangers:
            self.strangers = strangers
            if strangers:
                log.warning("containers_not_ours", deployment=self._deployment, names=strangers)
        return ours


def _of(shard: str, ours: Sequence[Found]) -> Found | None:
    return next((found for found in ours if found.shard == shard), None)
