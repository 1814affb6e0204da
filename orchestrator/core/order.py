"""A launch order with what its container needs beside what the shard itself is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from tgi_patches.contract import ShardSpec


@dataclass(frozen=True, slots=True)
class ShardOrder(ShardSpec):
    """Stands as a whole in the container's label; the shard reads the part that is its spec.

    Holds no secret: labels are for everybody who may ask the engine.
    """

    image: str = ""
    image_id: str = ""
    """Which image that name had when this was ordered: a name can be given to another one."""
    args: tuple[str, ...] = ()
    """Of the image's own command, in order: TGI's flags."""
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    """UUIDs, MIG UUIDs or CDI names, one per rank; empty for none."""
    gpus_named: bool = False
    """The user wants those GPUs; otherwise placement chose them, and others would do."""
    memory_bytes: int = 0
    """Limit of the container: its own memory and the pages of its arena; 0 for none."""
    shm_bytes: int = 0
    """Size of the container's /dev/shm, which NCCL uses; 0 for the engine's default."""
    mps_percent: int = 0
    """Share of each GPU's threads under MPS; 0 for a GPU of its own."""
    gpu_memory_fraction: float = 0.0
    """Share of each GPU's memory; 0 for all of it."""

    def __post_init__(self) -> None:
        ShardSpec.__post_init__(self)
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "gpus", tuple(self.gpus))

    @property
    def spec(self) -> ShardSpec:
        """What the shard itself is told."""
        return ShardSpec(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ShardSpec)})
