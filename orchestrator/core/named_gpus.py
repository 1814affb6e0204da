"""GPUs that the settings name for a shard: taken as they are, or refused in a sentence."""

from __future__ import annotations

from orchestrator.core.gpu_memory import gib
from orchestrator.core.gpu_room import WHOLE_PERCENT, GpuWish, Room, Rooms
from orchestrator.core.topology import Device, Topology, separation_problem
from orchestrator.errors import ConfigError


def named_group(wish: GpuWish, rooms: Rooms, topology: Topology) -> tuple[Device, ...]:
    """The devices that `wish.gpus` names, in its order; ConfigError for the first that it cannot have."""
    if len(wish.gpus) != wish.tp:
        raise ConfigError(
            f"{wish.shard} has {wish.tp} ranks (tp), but {len(wish.gpus)} GPUs are named for it."
        )
    by_uuid = {room.device.uuid: room for room in rooms}
    group: list[Device] = []
    for name in wish.gpus:
        device = topology.find(name)
        if device in group:
            raise ConfigError(f"{device} is named twice for {wish.shard}: each rank needs one of its own.")
        if problem := _unsuitable(wish, device) or _no_room(wish, by_uuid[device.uuid]):
            raise ConfigError(problem)
        group.append(device)
    return tuple(group)


def _unsuitable(wish: GpuWish, device: Device) -> str:
    """What is wrong with the device itself, whoever has it."""
    gpu, part = device.gpu, device.slice
    if part is None and gpu.mig_mode:
        slices = ", ".join(one.uuid for one in gpu.mig) or "none yet: make some with nvidia-smi mig"
        return f"{gpu} is split and cannot be had whole: name one of its slices ({slices})."
    if part is not None and wish.tp > 1:
        return (
            f"{wish.shard} has {wish.tp} ranks (tp), and {device} cannot be one of them: MIG slices do not "
            "reach each other, so name whole GPUs or set tp to 1."
        )
    if wish.separated and (problem := separation_problem(gpu)):
        return f"{problem} Name another GPU for {wish.shard}, or serve with shards.mixed."
    has_bytes = int(device.memory_bytes * (wish.memory_fraction or 1.0))
    if wish.needed_bytes > has_bytes:
        what = f"{wish.memory_fraction:g} of {device}" if wish.memory_fraction else str(device)
        return (
            f"{wish.shard} needs {gib(wish.needed_bytes)} on each GPU and {what} has {gib(has_bytes)}: "
            f"raise shards.{wish.role}.tp, lower limits.max_total_tokens or take a smaller model."
        )
    return ""


def _no_room(wish: GpuWish, room: Room) -> str:
    """Who has it already."""
    if room.kind.has_share(wish.mps_percent, wish.memory_fraction):
        return ""
    holders = [holder for holder in room.holders if holder.percent == 0 or wish.mps_percent == 0]
    if holders:
        return (
            f"{room.device} is named for {wish.shard} and {holders[0].text} has it: name another one, or "
            "give both a share of it by mps_percent and gpu_memory_fraction."
        )
    shares = ", ".join(holder.text for holder in room.holders)
    percent = sum(holder.percent for holder in room.holders) + wish.mps_percent
    fraction = sum(holder.fraction for holder in room.holders) + wish.memory_fraction
    if percent > WHOLE_PERCENT:
        over = f"mps_percent adds up to {percent}, which is over 100"
    else:
        over = f"gpu_memory_fraction adds up to {fraction:g}, which is over 1"
    return f"{room.device} is shared by {wish.shard} and {shares}: {over}."
