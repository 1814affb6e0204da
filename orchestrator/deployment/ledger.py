"""What a host has left while a deployment runs: GPUs by the engine, memory by the limits of containers."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.container_memory import arena_bytes, tmpfs_bytes
from orchestrator.core.gpu_claims import Claim
from orchestrator.core.order import ShardOrder
from orchestrator.core.placement import GpuClaim
from orchestrator.deployment.containers import placed_beside
from orchestrator.deployment.plan import Containers
from orchestrator.errors import ShardError, Unreachable
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.ledger import claims
from orchestrator.shards.docker.listing import containers_of
from tgi_patches.contract import ShardSpec


class Ledger:
    """Asks the engine anew each time."""

    def __init__(self, engine: Engine, deployment: str, containers: Containers) -> None:
        self._engine = engine
        self._deployment = deployment
        self._containers = containers

    async def room_for(self, order: ShardSpec) -> str:
        """Why it cannot be launched beside all that runs, in words; empty where it can."""
        if not isinstance(order, ShardOrder):
            return ""
        try:
            held = await claims(self._engine, self._containers.gpus_by_index)
            running = await containers_of(self._engine, self._deployment)
        except (ShardError, Unreachable) as error:
            return str(error)
        beside = [one.order for one in running if one.alive and one.order is not None]
        return no_room(order, held, beside, self._engine.facts.memory_bytes, self._containers.arena_bytes)

    async def place_for(self, order: ShardSpec) -> ShardSpec:
        """The same order on GPUs that no container has, where there are such."""
        topology = self._containers.topology
        if topology is None or not isinstance(order, ShardOrder):
            return order
        held = await claims(self._engine, self._containers.gpus_by_index)
        return placed_beside(order, topology, [gpu_claim(claim) for claim in held])


def no_room(
    order: ShardOrder, held: Sequence[Claim], beside: Sequence[ShardOrder], host_bytes: int, planned: int
) -> str:
    """In words; `beside` are the orders that run, `planned` the bytes of all arenas at `up`."""
    for claim in held:
        if claim.gpu in order.gpus and not (claim.shares and order.mps_percent):
            return f"{claim.gpu} is taken by {claim}"
    if order.memory_bytes and sum(one.memory_bytes for one in beside) + order.memory_bytes > host_bytes:
        return "the host has no memory for one shard more"
    if order.arena_bytes and arena_bytes([*beside, order]) > tmpfs_bytes(planned, host_bytes):
        return "the arenas' volume has no room for one more; it grows with `down` and `up`"
    return ""


def gpu_claim(held: Claim) -> GpuClaim:
    """As placement has it."""
    return GpuClaim(held.gpu, str(held), held.mps_percent, held.memory_fraction)
