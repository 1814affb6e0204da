"""From a plan of shards to orders for containers: image, GPUs, ports, memory, mounts.  Does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from orchestrator.core.container_memory import check_memory, embedded_bytes, limit_bytes
from orchestrator.core.kv_bytes import ModelShape, bytes_per_token
from orchestrator.core.order import ShardOrder
from orchestrator.core.placement import GpuClaim, GpuWish, Placement, place
from orchestrator.core.topology import Topology
from orchestrator.deployment.plan import Containers, Plan
from orchestrator.errors import ConfigError
from orchestrator.settings import RoleSection, Settings
from orchestrator.shards.docker.container import HOST_NETWORK
from orchestrator.shards.docker.engine import EngineFacts
from orchestrator.shards.docker.names import ARENAS, CPU_IMAGE, TGI_IMAGE, USER, network_name
from orchestrator.shards.docker.own import OwnContainer, bind_for
from tgi_patches.contract import Role, ShardSpec

FIRST_PORT = 3100
PORTS_APART = 10
TGI_PORTS = 4
"""Of one shard in a row: TGI's, the sidecar's, and on the host's network TGI's metrics and its ranks'."""
_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
RANKS_SHM_BYTES = 2**30
"""NCCL's buffers between the ranks of one container."""


@dataclass(frozen=True, slots=True)
class Host:
    """What is known of the host before anything is launched there."""

    engine: EngineFacts
    images: Mapping[str, str]
    """By name, of those that the settings ask for: TGI's version, or empty for the embedded shard."""
    image_ids: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    own: OwnContainer | None = None
    topology: Topology | None = None
    claims: tuple[GpuClaim, ...] = ()
    free_ports: Callable[[int], int] | None = None
    """The first of so many in a row on the host's own network."""


def cpu_image() -> str:
    return f"{CPU_IMAGE}:{version('tgi-orchestrator')}"


def image_of(section: RoleSection, settings: Settings, topology: Topology | None) -> str:
    gpus = topology is not None and bool(topology.gpus)
    return section.image or settings.docker.image or (TGI_IMAGE if gpus else cpu_image())


@dataclass(frozen=True, slots=True)
class Model:
    """What the containers need to know of the model."""

    shape: ModelShape
    weights_bytes: int
    gpu_bytes: Callable[[int], int]
    """Memory that one of so many ranks needs on its GPU."""
    folder: Path
    user: int = USER
    """Who can read its files."""


def in_containers(plan: Plan, settings: Settings, host: Host, model: Model) -> Plan:
    """The same plan, launched as containers.  ConfigError in a sentence for what cannot be placed there."""
    placement = _placed(plan.launched, settings, host, model)
    specs = _placed_specs(plan.launched, placement)
    network = network_of(settings, host.own)
    orders = []
    for index, (spec, section) in enumerate((spec, _section(settings, spec)) for spec in specs):
        made = _order(spec, section, index, settings, host, network)
        if placement is not None:
            cpus = spec.cpus if section.cpus else placement.cpus[spec.shard]
            made = dataclasses.replace(made, gpus=placement.gpus[spec.shard], cpus=cpus)
        own_bytes = _own_bytes(made, section, model, tgi=bool(host.images[made.image]))
        orders.append(dataclasses.replace(made, memory_bytes=limit_bytes(own_bytes, made)))
    check_memory(orders, host.engine.memory_bytes)
    elsewhere = [spec for spec in plan.specs if spec.shard in plan.urls]
    return dataclasses.replace(
        plan,
        arena_dir=Path(ARENAS),
        specs=tuple(sorted((*orders, *elsewhere), key=lambda spec: _ROLES.index(spec.role))),
        containers=Containers(
            network=network,
            binds=(bind_for(_with_blobs(model.folder), host.own),),
            user="" if model.user == USER else f"{model.user}:{USER}",
            arena_bytes=plan.arena_bytes,
            topology=host.topology,
            owner=host.owner,
            notes=(placement.mixed_because,) if placement and placement.mixed_because else (),
        ),
    )


def _section(settings: Settings, spec: ShardSpec) -> RoleSection:
    """Of its role; a mixed shard in place of a pair is launched as the prefill shards would be."""
    section: RoleSection = getattr(settings.shards, spec.role.value)
    return section if section.count else settings.shards.prefill


def _placed_specs(specs: Sequence[ShardSpec], placement: Placement | None) -> list[ShardSpec]:
    """Where the host cannot separate, mixed shards stand in place of those that were planned."""
    if placement is None or not placement.mixed_because:
        return list(specs)
    known = {spec.shard: spec for spec in specs}
    alike = max(specs, key=lambda spec: spec.max_batch_prefill_tokens)
    return [
        known.get(placed.shard)
        or dataclasses.replace(
            alike,
            shard=placed.shard,
            role=Role.MIXED,
            tensor_parallel=len(placed.gpus),
            arena_bytes=0,
            pinned_bytes=0,
            pulled_bytes=0,
            pull_listen="",
        )
        for placed in placement.shards
    ]


def _placed(specs: Sequence[ShardSpec], settings: Settings, host: Host, model: Model) -> Placement | None:
    """None where no shard asks for a GPU, and where there is none."""
    wishes = []
    for spec in specs:
        section = _section(settings, spec)
        named = section.gpus[int(spec.shard.rpartition("-")[2])] if section.gpus else ()
        if named and (host.topology is None or not host.topology.gpus):
            raise ConfigError(
                f"shards.{spec.role}.gpus names {named[0]}, and no GPU can be seen from here: "
                "describe them in docker.topology where NVML cannot be asked."
            )
        if host.images[image_of(section, settings, host.topology)] or named:
            wishes.append(
                GpuWish(
                    shard=spec.shard,
                    role=spec.role,
                    tp=spec.tensor_parallel,
                    gpus=tuple(named),
                    mps_percent=section.mps_percent,
                    memory_fraction=section.gpu_memory_fraction,
                    needed_bytes=model.gpu_bytes(spec.tensor_parallel),
                )
            )
    if not wishes or host.topology is None or not host.topology.gpus:
        return None
    return place(wishes, host.topology, host.claims)


def network_of(settings: Settings, own: OwnContainer | None) -> str:
    """The one that is named, else beside ourselves, else a bridge of the deployment's own.

    On Docker's default bridge, and on none, containers have no names for each other.
    """
    ours = [name for name in own.networks if name not in ("bridge", "none")] if own else []
    return next(filter(None, (settings.docker.network, *ours)), network_name(settings.deployment))


def _order(
    spec: ShardSpec, section: RoleSection, index: int, settings: Settings, host: Host, network: str
) -> ShardOrder:
    image = image_of(section, settings, host.topology)
    tgi = bool(host.images[image])
    port = FIRST_PORT + PORTS_APART * index
    if network == HOST_NETWORK and host.free_ports is not None:
        port = host.free_ports(TGI_PORTS)
    raw = {f.name: getattr(spec, f.name) for f in dataclasses.fields(ShardSpec)}
    raw |= {
        "host": "127.0.0.1" if network == HOST_NETWORK else "0.0.0.0",
        "port": port,
        "sidecar_port": port + 1 if tgi else 0,
        "arena_dir": ARENAS,
        # A container without cores of its own may use all: TGI's threads are its own concern.
        "cpus": spec.cpus if section.cpus or not tgi else (),
    }
    return ShardOrder(
        **raw,
        image=image,
        image_id=host.image_ids.get(image, ""),
        gpus_named=bool(section.gpus),
        args=tuple(section.args),
        env=dict(section.env),
        shm_bytes=section.shm_bytes or (RANKS_SHM_BYTES if spec.tensor_parallel > 1 else 0),
        mps_percent=section.mps_percent,
        gpu_memory_fraction=section.gpu_memory_fraction,
    )


def placed_beside(order: ShardOrder, topology: Topology, claims: Sequence[GpuClaim]) -> ShardOrder:
    """On GPUs that nobody has now, as large as those chosen before; the same where there are none."""
    if not order.gpus or order.gpus_named:
        return order
    wish = GpuWish(
        shard=order.shard,
        role=order.role,
        tp=order.tensor_parallel,
        mps_percent=order.mps_percent,
        memory_fraction=order.gpu_memory_fraction,
        needed_bytes=min(topology.find(gpu).memory_bytes for gpu in order.gpus),
    )
    try:
        (placed,) = place([wish], topology, claims).shards
    except ConfigError:
        return order
    return dataclasses.replace(order, gpus=placed.gpus, cpus=placed.cpus or order.cpus)


def _own_bytes(order: ShardOrder, section: RoleSection, model: Model, *, tgi: bool) -> int:
    if section.memory_bytes or tgi:
        return section.memory_bytes
    token_bytes = bytes_per_token(model.shape, order.dtype)
    return embedded_bytes(model.weights_bytes, token_bytes, order.max_total_tokens)


def _with_blobs(folder: Path) -> Path:
    """A snapshot of the hub's cache is links to files beside it."""
    return folder.parent.parent if folder.parent.name == "snapshots" else folder
