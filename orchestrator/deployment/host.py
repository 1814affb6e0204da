"""Plans a deployment of containers: asks the engine what is there, has the weights fetched, then decides."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config import Loaded
from orchestrator.core.bandwidth import with_measured
from orchestrator.core.gpu_claims import Claim
from orchestrator.core.gpu_memory import Load, gpu_need
from orchestrator.core.kv_bytes import shape_of
from orchestrator.core.topology import Topology
from orchestrator.deployment.bandwidths import read_bandwidths
from orchestrator.deployment.containers import Host, Model, cpu_image, image_of, in_containers
from orchestrator.deployment.ledger import gpu_claim
from orchestrator.deployment.plan import Plan, make_plan
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.state import StateFolder
from orchestrator.embedded.folder import checked_config, content_revision, is_complete
from orchestrator.embedded.weights import ResolvedModel, described, is_folder, pick_dtype
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.settings import RoleSection, Settings
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.images import image_facts
from orchestrator.shards.docker.ledger import claims
from orchestrator.shards.docker.listing import containers_of
from orchestrator.shards.docker.names import TGI_LABEL, USER
from orchestrator.shards.docker.own import bind_for, own_container
from orchestrator.shards.docker.weights import Wanted, fetch
from orchestrator.shards.process import free_ports
from orchestrator.topology import file as topology_file
from orchestrator.topology import nvml
from tgi_patches.contract import Role

FETCHED_FILE = "fetched.json"
FETCH_LIMIT_S = 6 * 3600.0
"""For a large model over a slow line."""
NVML_LIMIT_S = 20.0
"""A driver that has lost a GPU can take its time."""


async def planned_in_containers(loaded: Loaded, progress: Progress) -> Plan:
    """The plan of `up`.  Blocks while weights are fetched; ConfigError for what cannot work there."""
    settings = loaded.settings
    try:
        engine = await Engine.connect(settings.docker.host)
    except Unreachable as error:
        # Whoever wants to start something there has named an engine that cannot be used.
        raise ConfigError(str(error)) from None
    try:
        host = await surveyed(engine, settings)
        model = await found_model(engine, settings, host, progress)
    finally:
        await engine.aclose()
    config = checked_config(model.path, model.name)
    dtype = pick_dtype(settings.model.dtype, gpu=any(host.images.values()))
    cores = sorted(os.sched_getaffinity(0)) if host.own is None else list(range(host.engine.cpus))
    plan = make_plan(loaded, model, config, dtype, cores)
    return in_containers(plan, settings, host, _model(plan, settings, config))


async def surveyed(engine: Engine, settings: Settings) -> Host:
    """What there is, before anything is launched."""
    topology = await _topology(settings)
    folder = StateFolder.of(settings.deployment, os.environ)
    owner = await asyncio.to_thread(folder.owner)
    await _check_ours(engine, settings.deployment, owner)
    if topology is not None:
        topology = with_measured(topology, await asyncio.to_thread(read_bandwidths, folder))
    images: dict[str, str] = {}
    ids: dict[str, str] = {}
    for role in Role:
        section: RoleSection = getattr(settings.shards, role.value)
        if section.count and not section.urls:
            name = image_of(section, settings, topology)
            facts = await image_facts(engine, name)
            images[name] = facts.labels[TGI_LABEL] if facts.tgi else ""
            ids[name] = facts.id
    host = Host(
        engine=engine.facts,
        images=images,
        image_ids=ids,
        owner=owner,
        own=await own_container(engine),
        topology=topology,
        free_ports=_each_once(),
    )
    held = await claims(engine, topology.uuids_by_index if topology else {})
    others = [claim for claim in held if claim.deployment != settings.deployment and not _is_own(claim, host)]
    return replace(host, claims=tuple(map(gpu_claim, others)))


async def _check_ours(engine: Engine, deployment: str, owner: str) -> None:
    """ConfigError where the name is taken on this engine by an orchestrator with another state folder."""
    others = [one.name for one in await containers_of(engine, deployment) if one.owner != owner]
    if others:
        raise ConfigError(
            f"The deployment {deployment!r} runs on this engine already, launched from another state folder "
            f"({', '.join(sorted(others))}): name this one otherwise (-d), or remove that one with "
            f"`tgi-orchestrator down -d {deployment} --force`."
        )


def _each_once() -> Callable[[int], int]:
    """Free ports of loopback, none of them twice."""
    given: set[int] = set()

    def first_of(count: int) -> int:
        port = free_ports("127.0.0.1", given, count)
        given.update(range(port, port + count))
        return port

    return first_of


def _is_own(claim: Claim, host: Host) -> bool:
    """The orchestrator's own container, which may have been given GPUs to ask NVML for them."""
    return host.own is not None and claim.container == host.own.name


async def _topology(settings: Settings) -> Topology | None:
    if settings.docker.topology is not None:
        return await asyncio.to_thread(topology_file.read_topology, settings.docker.topology)
    try:
        async with asyncio.timeout(NVML_LIMIT_S):
            return await asyncio.to_thread(nvml.discover)
    except TimeoutError:
        raise ConfigError(
            f"NVIDIA's driver did not answer in {NVML_LIMIT_S:.0f} s: look at it with nvidia-smi, "
            "or describe the GPUs in docker.topology."
        ) from None


# --- the model ----------------------------------------------------------------------------------


async def found_model(engine: Engine, settings: Settings, host: Host, progress: Progress) -> ResolvedModel:
    """A folder, or what a container of a shard's image fetches into the cache, once.

    Everything that runs afterwards is offline.
    """
    wanted = settings.model
    if is_folder(wanted.id):
        return await asyncio.to_thread(_local, Path(wanted.id))
    note = _Fetched(wanted.cache / FETCHED_FILE, f"{wanted.id}@{wanted.revision or ''}")
    known = await asyncio.to_thread(note.folder)
    if known is None:
        progress.step(f"Fetching {wanted.id}")
        known = Path(await _fetched(engine, settings, host, progress))
        await asyncio.to_thread(note.write, known)
    return await asyncio.to_thread(described, known, wanted.id, _revision)


async def _fetched(engine: Engine, settings: Settings, host: Host, progress: Progress) -> str:
    """The folder, at the same path in that container and here."""
    wanted, cache = settings.model, settings.model.cache
    await asyncio.to_thread(cache.mkdir, parents=True, exist_ok=True)
    user = (await asyncio.to_thread(cache.stat)).st_uid
    told = await fetch(
        engine,
        settings.deployment,
        Wanted(
            image=next(iter(host.images), cpu_image()),
            model=wanted.id,
            revision=wanted.revision or "",
            cache=str(cache),
            mounts=(bind_for(cache, host.own, read_only=False),),
            user="" if user == USER else f"{user}:{USER}",
            env=hub_variables(os.environ, cache),
            owner=host.owner,
            token=await asyncio.to_thread(_token, wanted.token_file),
        ),
        lambda line: progress.step(fetching(wanted.id, line)),
        within_s=FETCH_LIMIT_S,
        may_act=_nobody_else,
    )
    progress.done(f"Fetched {wanted.id}")
    return told["path"]


def fetching(model: str, line: str) -> str:
    """For a user, of a line that the container writes: a sentence, or how far it is as JSON."""
    try:
        told = json.loads(line)
        done, total = told["done_bytes"], told["total_bytes"]
        return f"Fetching {model}: {done / 1e9:.2f} of {total / 1e9:.2f} GB ({done / total:.0%})"
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        return f"Fetching {model}: {line}"


def hub_variables(env: Mapping[str, str], cache: Path) -> dict[str, str]:
    """For a container that asks the hub: where it is, and where its answers are kept."""
    passed = {name: env[name] for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE") if env.get(name)}
    return {**passed, "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"), "HOME": "/tmp"}


def _token(path: Path | None) -> bytes:
    try:
        return path.read_bytes().strip() if path else b""
    except OSError as error:
        raise ConfigError(f"model.token_file {path} cannot be read: {error.strerror}.") from None


async def _nobody_else() -> None:
    """`up` holds the deployment's lock here, and no conductor leads yet."""


def _local(path: Path) -> ResolvedModel:
    folder = path.expanduser().resolve()
    return described(folder, folder.name, content_revision)


def _revision(folder: Path) -> str:
    """The hub's commit, or a hash where the folder is none of its snapshots."""
    return folder.name if folder.parent.name == "snapshots" else content_revision(folder)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What was fetched before, by id and revision: whoever has it asks no hub and starts no container."""

    path: Path
    key: str

    def folder(self) -> Path | None:
        """None where nothing was, or where it is not complete any more."""
        named = self._read().get(self.key)
        return Path(named) if named and is_complete(Path(named), self.key) else None

    def write(self, folder: Path) -> None:
        self.path.write_text(json.dumps({**self._read(), self.key: str(folder)}, indent=2))

    def _read(self) -> dict[str, str]:
        try:
            told = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}


def _model(plan: Plan, settings: Settings, config: Mapping[str, Any]) -> Model:
    model, limits = plan.model, settings.limits
    weights = sum(file.stat().st_size for file in model.path.glob("*.safetensors"))

    def gpu_bytes(ranks: int) -> int:
        load = Load(plan.dtype, ranks, plan.max_total_tokens, limits.max_batch_prefill_tokens)
        return gpu_need(config, load, weights).needed_bytes

    return Model(
        shape=shape_of(config),
        weights_bytes=weights,
        gpu_bytes=gpu_bytes,
        folder=model.path,
        user=USER if _for_all(model.path) else model.path.stat().st_uid,
    )


def _for_all(folder: Path) -> bool:
    """Whether everybody may read what is in it."""
    ways = all(parent.stat().st_mode & stat.S_IXOTH for parent in (folder, *folder.parents))
    return ways and all(file.stat().st_mode & stat.S_IROTH for file in (folder, *folder.iterdir()))
