"""Both sides of `verify`: the separated pair and one shard, found where they run or started for it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from orchestrator.config import Loaded
from orchestrator.deployment.gateway import last_words
from orchestrator.deployment.logging import json_log
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.reach import Reach
from orchestrator.deployment.start import Order, ordered
from orchestrator.deployment.state import TEMPORARY, State, StateFolder
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.shards.launcher import BAD_INPUT
from orchestrator.shards.process import ProcessLauncher
from orchestrator.verify.asking import get_json
from tgi_patches.contract import Role, ShardSpec

START_LIMIT_S = 600.0
STOP_GRACE_S = 5.0
POLL_S = 0.1
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """Where to ask, and what is served there."""

    separated_url: str
    reference_url: str
    reference: str
    """The reference in words."""
    model: str
    dtype: str
    splits: bool = True
    """There is a pair of prefill and decode shards."""


@contextmanager
def temporary_order(loaded: Loaded, progress: Progress, *, calibrate: bool = False) -> Iterator[Order]:
    """The deployment of the settings under a name and a port of its own, gone afterwards.

    What is measured on it is forgotten as well, so it is calibrated only where that is wanted.
    """
    settings = loaded.settings
    roles = (settings.shards.prefill, settings.shards.decode, settings.shards.mixed)
    if any(role.urls for role in roles):
        raise ConfigError(
            "Shards at given URLs belong to one deployment: start it with `up`, then verify it."
        )
    name = f"{TEMPORARY}{os.getpid()}"
    changed = settings.model_copy(
        update={
            "deployment": name,
            "gateway": settings.gateway.model_copy(update={"listen": "127.0.0.1:0", "admin_listen": ""}),
            "routing": settings.routing.model_copy(update={"calibrate": calibrate}),
        }
    )
    ours = ("deployment", "gateway.listen", "gateway.admin_listen", "routing.calibrate")
    origins = {**loaded.origins, **dict.fromkeys(ours, "flag")}
    try:
        with (
            ordered(Loaded(changed, origins), progress) as order,
            json_log(order.folder.log_of("conductor")),
        ):
            yield order
    finally:
        shutil.rmtree(StateFolder.of(name, os.environ).path, ignore_errors=True)


@asynccontextmanager
async def both_sides(
    *, url: str, state: State | None, reference: str | None, progress: Progress
) -> AsyncIterator[Found]:
    """`url` is a gateway; without `reference` its own mixed shard is taken, or one started from `state`.

    ConfigError when there is no other side; Unreachable when a side does not answer.
    """
    async with AsyncExitStack() as stack:
        told = await _told_by(Reach.of(state) if state else Reach.at(url, os.environ))
        shards: list[dict[str, Any]] = told["shards"]
        mixed = _ready_mixed(shards)
        if reference is not None:
            where, named = reference, reference
        elif mixed is not None:
            where, named = mixed["url"], f"shard {mixed['shard']}"
        elif state is not None:
            progress.step("Starting a mixed shard to compare with")
            where = await stack.enter_async_context(mixed_shard(state))
            named = "a mixed shard of its own"
            progress.done("Mixed shard to compare with")
        else:
            raise ConfigError(
                f"{url} has no mixed shard and does not run on this machine: name a server with --against."
            )
        dtype = shards[0]["dtype"] if shards else "float32"
        yield Found(url, where, named, str(told["model"]), dtype, splits=_has_pair(shards))


async def _told_by(reach: Reach) -> dict[str, Any]:
    async with reach.admin(ASK_TIMEOUT_S) as client:
        told: dict[str, Any] = await get_json(client, "/admin/status")
    return told


def _has_pair(shards: list[dict[str, Any]]) -> bool:
    ready = {one["role"] for one in shards if one["state"] == "ready"}
    return {Role.PREFILL, Role.DECODE} <= ready


def _ready_mixed(shards: list[dict[str, Any]]) -> Mapping[str, Any] | None:
    """A mixed shard, which must be named as such: any other one may be one half of the pair."""
    return next((one for one in shards if one["role"] == Role.MIXED and one["state"] == "ready"), None)


@asynccontextmanager
async def mixed_shard(state: State) -> AsyncIterator[str]:
    """The URL of a shard like those of `state`: same model, dtype and number of threads.

    The number of threads matters: BLAS sums in another order with another one.
    """
    if state.in_containers and any(spec.sidecar_port for spec in state.specs):
        raise ConfigError(
            "A TGI to compare with is not started beside those in containers: give the deployment a mixed "
            "shard (shards.mixed.count: 1), or name a stock TGI with --against."
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "A shard to compare with needs the extra `shard`, which is not installed here: give the "
            "deployment a mixed shard (shards.mixed.count: 1), or name a server with --against."
        )
    spec = mixed_spec(state)
    logs = Path(tempfile.mkdtemp(prefix="tgi-orchestrator-verify-"))
    launcher = ProcessLauncher(logs)
    try:
        running = await launcher.launch(spec)
        await _until_healthy(launcher, spec.shard, running.url)
        yield running.url
    finally:
        await launcher.close(STOP_GRACE_S)
        shutil.rmtree(logs, ignore_errors=True)


def mixed_spec(state: State) -> ShardSpec:
    """The decode shard's order as a mixed one; it takes whole prompts, as the prefill shard does."""
    model = next((spec for spec in state.specs if spec.role is Role.DECODE), state.specs[0])
    return dataclasses.replace(
        model,
        shard=f"verify-{os.getpid()}",
        role=Role.MIXED,
        # A process of this machine, whatever the others are.
        host="127.0.0.1",
        port=0,
        sidecar_port=0,
        arena_bytes=0,
        pulled_bytes=0,
        max_batch_prefill_tokens=max(spec.max_batch_prefill_tokens for spec in state.specs),
    )


async def _until_healthy(launcher: ProcessLauncher, shard: str, url: str) -> None:
    ended = asyncio.create_task(launcher.wait(shard))
    try:
        async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient(trust_env=False) as client:
            while not await _healthy(client, url):
                await asyncio.wait([ended], timeout=POLL_S)
                if ended.done():
                    how = ended.result()
                    kind = ConfigError if how.code == BAD_INPUT else OrchestratorError
                    raise kind(last_words(launcher.log_path(shard)))
    except TimeoutError:
        raise OrchestratorError(
            f"The shard to compare with was not ready in {START_LIMIT_S:.0f} s."
        ) from None
    finally:
        ended.cancel()


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=ASK_TIMEOUT_S)).status_code == 200
    except httpx.TransportError:
        return False
