"""Why shards find no GPUs, in a sentence, and the nearest that would."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.core.gpu_memory import gib
from orchestrator.core.gpu_room import WHOLE_PERCENT, Fitting, GpuWish, Room, Rooms, rooms_of, state_of
from orchestrator.core.topology import Device, Topology, separation_problem
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role


def cannot_place(wishes: Sequence[GpuWish], rooms: Rooms, topology: Topology) -> ConfigError:
    """`wishes` without named GPUs, that do not fit into `rooms` all together."""
    if not topology.gpus:
        return ConfigError(f"This host has no GPU, and {_wanted(wishes)} wanted.")
    for wish in wishes:
        if problem := _never_fits(wish, topology):
            return ConfigError(problem)
    free = [room for room in rooms if _is_free(room, wishes)]
    notes = "".join(f"; {note}" for note in _notes(wishes, rooms, topology))
    head = f"{_free(free)} free and {_wanted(wishes)} wanted"
    return ConfigError(f"{head}{notes}: {_nearest(wishes, rooms)} can be placed.")


def _never_fits(wish: GpuWish, topology: Topology) -> str:
    """What is wrong with one shard on this host, even if all of it were free."""
    anyhow = replace(wish, needed_bytes=0)
    able = [room.device for room in rooms_of(topology) if room.kind.takes(anyhow)]
    if not able and wish.separated and topology.devices() and (old := separation_problem(topology.gpus[0])):
        return old
    largest = max(able, key=lambda device: device.memory_bytes, default=None)
    share = wish.memory_fraction or 1.0
    if largest is None or wish.needed_bytes <= largest.memory_bytes * share:
        return ""
    what = f"{wish.memory_fraction:g} of the largest" if wish.memory_fraction else "the largest"
    return (
        f"{wish.shard} needs {gib(wish.needed_bytes)} on each GPU and {what} here, {largest}, has "
        f"{gib(int(largest.memory_bytes * share))}: raise shards.{wish.role}.tp, lower "
        "limits.max_total_tokens or take a smaller model."
    )


def _is_free(room: Room, wishes: Sequence[GpuWish]) -> bool:
    return not room.holders and any(room.kind.takes(wish) for wish in wishes)


def _notes(wishes: Sequence[GpuWish], rooms: Rooms, topology: Topology) -> Iterator[str]:
    """Why other GPUs of the host do not count, those with the same reason together."""
    reasons: dict[str, list[Device]] = {}
    for room in rooms:
        if not (_is_free(room, wishes) or _only_grouped(room, wishes)):
            reasons.setdefault(_why_not(room, wishes), []).append(room.device)
    for reason, devices in reasons.items():
        yield f"{_together(devices)} {_are(len(devices))} {reason}"
    for gpu in topology.gpus:
        if gpu.mig_mode and not gpu.mig:
            yield f"{gpu} is split and has no slices yet"
    if any(wish.tp > 1 for wish in wishes) and any(room.device.slice for room in rooms):
        yield "MIG slices cannot be the ranks of one shard"


def _why_not(room: Room, wishes: Sequence[GpuWish]) -> str:
    if room.holders:
        return f"taken by {' and '.join(holder.text for holder in room.holders)}"
    if all(wish.separated for wish in wishes) and separation_problem(room.device.gpu) is not None:
        return "too old for prefill and decode"
    return "too small"


def _only_grouped(room: Room, wishes: Sequence[GpuWish]) -> bool:
    """A slice where all shards have several ranks: one note is about all of these."""
    return not room.holders and room.device.slice is not None and all(wish.tp > 1 for wish in wishes)


def _together(devices: Sequence[Device]) -> str:
    """`GPU 2 (NVIDIA A10)`, `GPUs 0, 1 and 3`."""
    if len(devices) == 1:
        return str(devices[0])
    names = [device.uuid if device.slice else str(device.gpu.index) for device in devices]
    return f"GPUs {', '.join(names[:-1])} and {names[-1]}"


def _free(rooms: Sequence[Room]) -> str:
    """`1 GPU and 3 MIG slices are`."""
    slices = sum(room.device.slice is not None for room in rooms)
    whole = len(rooms) - slices
    words = [_counted(whole, "GPU")] * (whole > 0 or not slices) + [_counted(slices, "MIG slice")] * bool(
        slices
    )
    return f"{' and '.join(words)} {_are(len(rooms))}"


def _wanted(wishes: Sequence[GpuWish]) -> str:
    """`4 are`, `2 and 1 share are`."""
    whole = sum(wish.tp for wish in wishes if not wish.mps_percent)
    shares = sum(wish.tp for wish in wishes if wish.mps_percent)
    words = [str(whole)] * bool(whole) + [_counted(shares, "share")] * bool(shares)
    return f"{' and '.join(words)} {_are(whole + shares)}"


def _nearest(wishes: Sequence[GpuWish], rooms: Rooms) -> str:
    """The most of what was asked for that fits, both phases before more of one."""
    kinds: dict[GpuWish, int] = {}
    for wish in wishes:
        kind = replace(wish, shard="")
        kinds[kind] = kinds.get(kind, 0) + 1
    state = state_of(room.kind for room in rooms)
    phases = {wish.role for wish in wishes if wish.separated}

    def worth(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        there = {kind.role for kind, count in zip(kinds, counts, strict=True) if count}
        return len(there & phases), sum(counts), counts

    def fits(counts: tuple[int, ...]) -> bool:
        chosen = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        return Fitting(tuple(chosen)).fits(state)

    ranges = [range(min(count, _most(kind, rooms)) + 1) for kind, count in kinds.items()]
    best = next(filter(fits, sorted(itertools.product(*ranges), key=worth, reverse=True)))
    words = [_words(kind, count) for kind, count in zip(kinds, best, strict=True) if count]
    return " and ".join(words) or "nothing of it"


def _most(kind: GpuWish, rooms: Rooms) -> int:
    """More of a kind than this fit in no case."""
    return len(rooms) * (WHOLE_PERCENT // (kind.mps_percent or WHOLE_PERCENT)) // kind.tp


def _words(kind: GpuWish, count: int) -> str:
    """`1 prefill with tp 2`."""
    tp = f" with tp {kind.tp}" if kind.tp > 1 else ""
    share = f" of {kind.mps_percent} %" if kind.mps_percent else ""
    return f"{count} {Role(kind.role).value}{tp}{share}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
