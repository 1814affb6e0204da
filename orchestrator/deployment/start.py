"""Starts a deployment and stops it in order.

locked -> port bound -> model found -> planned      (`ordered`: nothing runs yet, errors cost nothing)
-> Redis -> conductor with its shards -> gateway -> ready -> ... -> the same backwards   (`deployed`)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from orchestrator.access import check_access
from orchestrator.conductor import Conductor
from orchestrator.config import API_KEYS_VARIABLE, Loaded, hidden
from orchestrator.core.bandwidth import starting_costs
from orchestrator.core.costbook import CostBook
from orchestrator.costs import CostFile
from orchestrator.deployment.arena import free_bytes, remove_arenas
from orchestrator.deployment.bandwidths import read_bandwidths
from orchestrator.deployment.environment import child_env
from orchestrator.deployment.gateway import Sockets, url_of
from orchestrator.deployment.host import planned_in_containers
from orchestrator.deployment.key import key_env, minted, minted_admin_token
from orchestrator.deployment.launching import launching, while_leading
from orchestrator.deployment.logging import json_log
from orchestrator.deployment.plan import Plan, WantedShard, check_room, make_plan, shard_plan
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.ready import until_ready
from orchestrator.deployment.redis import kept_redis, remove_left_over
from orchestrator.deployment.scheduling import calibrating, scheduler_of
from orchestrator.deployment.state import DOCKER, TEMPORARY, State, StateFolder, started_ticks
from orchestrator.deployment.workers import GatewayWorkers
from orchestrator.embedded.folder import checked_config
from orchestrator.embedded.weights import pick_dtype, resolve_model
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.queues import ConductorQueue
from orchestrator.settings import Settings
from orchestrator.shards.probe import http_probe
from orchestrator.shards.process import LOG_LIMIT_BYTES, ROTATE_EVERY_S, rotate
from tgi_patches.contract import ShardSpec
from tgi_patches.key import key_from

STOP_LIMIT_S = 20.0
"""For the conductor to drain and stop its shards."""
PROBE_TIMEOUT_S = 5.0
COSTS_FILE = "costs.json"
"""In the state folder: what phases take here, so that a restart need not learn it again."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be started, with the lock and the port already ours."""

    loaded: Loaded
    plan: Plan
    folder: StateFolder
    sockets: Sockets
    key_env: Mapping[str, str] = field(default_factory=dict)
    """Where every process of the deployment finds its key."""
    admin_token_file: Path | None = None
    """The token that the gateway asks for at `/admin` and `/metrics`, where it does."""

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def logs(self) -> Path:
        return self.folder.logs

    @property
    def deployment(self) -> str:
        return self.loaded.settings.deployment

    def log_files(self) -> dict[str, Path]:
        """By shard name, and of `conductor` and `gateway`."""
        # The engine has those of containers.
        shards = [] if self.plan.containers else [spec.shard for spec in self.plan.launched]
        names = [*shards, "conductor", "gateway"]
        return {name: self.folder.log_of(name) for name in names}


@dataclass(slots=True)
class Ending:
    """How a deployment of containers ends; one of processes always ends whole."""

    ready: bool = False
    """It was; a start that failed takes back only what it launched itself."""
    removes: bool = False
    """Somebody wants it gone: otherwise shards go on for the next `up`."""

    @property
    def leaves(self) -> bool:
        return self.ready and not self.removes

    @property
    def rolls_back(self) -> bool:
        return not self.ready and not self.removes


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment that is ready."""

    state: State
    parts: tuple[asyncio.Task[None], ...]
    workers: GatewayWorkers
    ending: Ending

    async def broken(self) -> None:
        """Raises when a part has ended that must not end."""
        done, _ = await asyncio.wait(self.parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()
            raise OrchestratorError(f"The {part.get_name()} ended.")


@contextmanager
def ordered(loaded: Loaded, progress: Progress) -> Iterator[Order]:
    """Everything that can fail before a process starts: ConfigError in one sentence.

    Blocks while a model is downloaded.  Lock and port are given back at the end.
    """
    settings = loaded.settings
    with json_log(Path(os.devnull)):  # the workers will say the same in their log
        check_access(settings.gateway, os.environ)
    folder = StateFolder.of(settings.deployment, os.environ)
    folder.create()
    with folder.locked():
        clean_up(folder)
        _clean_up_beside(folder)
        folder.clear_logs()
        key = key_env(loaded, os.environ) or minted(folder)
        token = minted_admin_token(settings.gateway, folder, os.environ)
        with contextlib.closing(Sockets.bound(settings.gateway)) as sockets:
            progress.step("Looking for the model")
            plan = planned(loaded, progress)
            progress.done(f"Model {plan.model.name} in {plan.dtype}")
            for note in plan.containers.notes if plan.containers else ():
                progress.done(note)
            yield Order(loaded, plan, folder, sockets, key, token)


def clean_up(folder: StateFolder) -> bool:
    """Remove what an `up` left behind that was killed; True if there was anything.

    The caller holds the folder's lock, so that `up` is gone.
    """
    left = folder.read()
    if left is not None:
        if not left.in_containers:
            remove_arenas(Path(left.arena_dir), left.deployment)
        remove_left_over(left.redis_url)
        folder.forget()
    return left is not None


def _clean_up_beside(folder: StateFolder) -> None:
    """The same for other deployments: their arenas hold memory until somebody removes them."""
    for other in folder.abandoned():
        # Whoever holds its lock is starting it right now, and cleans up itself.
        with contextlib.suppress(ConfigError), other.locked():
            clean_up(other)
            if other.path.name.startswith(TEMPORARY):
                shutil.rmtree(other.path, ignore_errors=True)


def planned(loaded: Loaded, progress: Progress, alone: WantedShard | None = None) -> Plan:
    """The whole deployment's, or that of one shard alone.  Blocks while a model is downloaded.

    ConfigError in one sentence for what cannot work here.
    """
    if loaded.settings.launcher == DOCKER and alone is None:
        return asyncio.run(planned_in_containers(loaded, progress))
    wanted = loaded.settings.model
    model = resolve_model(wanted.id, wanted.revision, wanted.cache, wanted.token_file, progress.done)
    config = checked_config(model.path, model.name)
    cores = sorted(os.sched_getaffinity(0))
    dtype = pick_dtype(wanted.dtype)
    plan = (
        shard_plan(loaded, model, config, dtype, cores, alone)
        if alone
        else make_plan(loaded, model, config, dtype, cores)
    )
    check_room(plan.arena_bytes, free_bytes(plan.arena_dir), plan.arena_dir)
    return plan


def planned_orders(loaded: Loaded, progress: Progress) -> tuple[ShardSpec, ...]:
    """What `up` would launch by these settings now, beside shards at given URLs.  Launches nothing."""
    return planned(loaded, progress).launched


@asynccontextmanager
async def deployed(order: Order, progress: Progress, ending: Ending | None = None) -> AsyncIterator[Running]:
    """Everything runs and is ready inside the block; nothing of it is left after it."""
    settings = order.loaded.settings
    ending = ending or Ending(removes=True)
    async with AsyncExitStack() as stack:
        stack.callback(_forgotten, order, ending)
        progress.step("Starting Redis")
        given = settings.redis.url
        redis_url = given if given is not None else await stack.enter_async_context(kept_redis())
        shown = hidden("redis.url", redis_url)
        progress.done(f"Redis at {shown}" if given else "Redis of its own")
        state = _state_of(order, shown)
        order.folder.write(state)
        count = len(order.plan.launched)
        progress.step(f"Starting {count} {'shard' if count == 1 else 'shards'} and the gateway")
        conductor, conducting = await stack.enter_async_context(_conducting(order, redis_url, ending))
        workers = _gateway(order, redis_url)
        parts = (conducting, await stack.enter_async_context(workers.running()))
        stack.callback(lambda: workers.leave() if ending.leaves else None)
        own_logs = [order.folder.log_of(name) for name in ("conductor", "gateway")]
        await stack.enter_async_context(kept_short(own_logs))
        await until_ready(conductor, parts, state, progress)
        ending.ready = True
        yield Running(state, parts, workers, ending)


@asynccontextmanager
async def kept_short(
    logs: Sequence[Path], limit_bytes: int = LOG_LIMIT_BYTES, every_s: float = ROTATE_EVERY_S
) -> AsyncIterator[None]:
    """Inside, each log that grows over the limit is moved to `.log.1`; its writers must append."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(every_s)
            for path in logs:
                await asyncio.to_thread(rotate, path, limit_bytes)

    task = asyncio.create_task(watch(), name="log rotation")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _state_of(order: Order, redis_url: str) -> State:
    gateway, sockets = order.loaded.settings.gateway, order.sockets
    tls = gateway.tls_cert is not None
    return State(
        deployment=order.deployment,
        pid=os.getpid(),
        pid_started=started_ticks(os.getpid()) or 0,
        url=url_of(sockets.clients, tls=tls),
        admin_url=url_of(sockets.admin, tls=tls) if sockets.admin else "",
        admin_token_file=str(order.admin_token_file or ""),
        tls_cert=str(gateway.tls_cert or ""),
        api_keys=gateway.keys_file is not None or bool(os.environ.get(API_KEYS_VARIABLE)),
        redis_url=redis_url,
        model_name=order.plan.model.name,
        dtype=order.plan.dtype,
        arena_dir=str(order.plan.arena_dir),
        specs=order.plan.specs,
        logs={name: str(path) for name, path in order.log_files().items()},
        urls=dict(order.plan.urls),
        launcher=order.loaded.settings.launcher,
        docker_host=order.loaded.settings.docker.host,
        settings=order.loaded.told(),
    )


def _forgotten(order: Order, ending: Ending) -> None:
    """What stands in files.  Of containers that go on, the next `up` and `down` read it."""
    if order.plan.containers is None:
        remove_arenas(order.plan.arena_dir, order.deployment)
        order.folder.forget()
    elif not ending.leaves:
        order.folder.forget()


@asynccontextmanager
async def _conducting(
    order: Order, redis_url: str, ending: Ending
) -> AsyncIterator[tuple[Conductor, asyncio.Task[None]]]:
    """The conductor and its shards; both are stopped at the end, shards after their requests.

    Containers are left, unless somebody wants them gone or the start failed that launched them.
    """
    settings = order.loaded.settings
    file = CostFile(order.folder.path / COSTS_FILE)
    costs = file.read().begin_with(starting_costs(read_bandwidths(order.folder)))
    async with (
        _kept(file, costs),
        calibrating(settings, key_from(order.key_env)) as calibrator,
        httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client,
        ConductorQueue(redis_url, order.deployment, f"conductor-{os.getpid()}") as queue,
        launching(order, while_leading(queue), lambda: ending.rolls_back) as place,
    ):
        conductor = Conductor(
            queue,
            place.launcher,
            order.plan.specs,
            http_probe(client),
            room_for=place.room_for,
            place_for=place.place_for,
            scheduler=scheduler_of(settings),
            costs=costs,
            calibrator=calibrator,
            queue_size=settings.limits.queue_size,
        )
        task = asyncio.create_task(conductor.run(), name="conductor")
        try:
            yield conductor, task
        finally:
            keeps = order.plan.containers is not None and not ending.removes
            conductor.stop(keep_shards=keeps)
            await asyncio.wait([task], timeout=STOP_LIMIT_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _kept(file: CostFile, costs: CostBook) -> AsyncIterator[None]:
    """Inside, the cost book is written now and then, and at the end."""
    task = asyncio.create_task(file.keep(costs), name="cost file")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _gateway(order: Order, redis_url: str) -> GatewayWorkers:
    changes = {
        "redis.url": redis_url,
        "limits.max_input_tokens": order.plan.max_input_tokens,
        "limits.max_total_tokens": order.plan.max_total_tokens,
        "gateway.admin_token_file": order.admin_token_file,
    }
    env = child_env(order.loaded, {**os.environ, **order.key_env}, changes)
    return GatewayWorkers(
        order.sockets,
        env,
        order.folder.path / "gateway",
        count=order.loaded.settings.gateway.workers,
        log_file=order.folder.log_of("gateway"),
        outlive_s=order.loaded.settings.limits.request_timeout_s if order.plan.containers else None,
    )
