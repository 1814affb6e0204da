"""Which GPUs a stock TGI container has, and a first split of them into prefill and decode.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.launcher_flags import Told
from orchestrator.core.stock import ALL, CDI, Gpus

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of each shard by role; `placed` false leaves all of it to placement."""

    placed: bool
    why: str
    prefill: Groups = ()
    decode: Groups = ()
    mixed: Groups = ()
    notes: tuple[str, ...] = ()


def split(gpus: Sequence[str], tp: int) -> Split:
    """The first `tp` GPUs for prefill, each further `tp` for a decode shard; a single group serves mixed."""
    if len(gpus) < max(2, tp):
        return _left_to_placement(gpus, tp)
    groups = tuple(tuple(gpus[at : at + tp]) for at in range(0, len(gpus) - tp + 1, tp))
    left = gpus[len(groups) * tp :]
    unused = (f"Without a shard, since one takes {tp}: {', '.join(left)}.",) if left else ()
    if len(groups) > 1:
        why = "A first split: one group of GPUs computes prompts, the others write answers."
        return Split(True, why, prefill=groups[:1], decode=groups[1:], notes=unused)
    half = f" Where it fits into {tp // 2}, give prefill and decode {tp // 2} each." if tp % 2 == 0 else ""
    note = f"The model takes {tp} GPUs, so one shard serves it whole (mixed).{half}"
    return Split(True, "All GPUs in one shard that does both.", mixed=groups, notes=(note, *unused))


def _left_to_placement(gpus: Sequence[str], tp: int) -> Split:
    why = "Placement chooses the GPUs."
    if not gpus:
        return Split(False, why)
    if len(gpus) < tp:
        note = f"The container has {len(gpus)} GPUs for {tp} ranks: placement looks for others."
    else:
        note = f"The container has one GPU, {gpus[0]}; placement takes any that are free."
    return Split(False, why, notes=(note,))


def ranks_of(told: Told, gpus: Gpus, host: Sequence[str] | None, visible: str | None) -> int:
    """Ranks that the launcher starts: as told, else one for each GPU that it sees; 1 where nothing tells."""
    given = told.number("num-shard")
    if given is not None:
        return given
    if (told.one("sharded") or "").lower() == "false":
        return 1
    if visible:
        return len(visible.split(","))
    if gpus.count == ALL:
        return len(host or ()) or 1
    return len(gpus.named) or max(gpus.count, 1)


def resolved(gpus: Gpus, host: Sequence[str] | None, visible: str | None) -> tuple[tuple[str, ...], str]:
    """(UUIDs and CDI names, a sentence where they are not known).

    `host` has the UUIDs of this host by index; `visible` is the container's CUDA_VISIBLE_DEVICES.
    """
    if gpus.count:
        if host is None:
            which = "all GPUs" if gpus.count == ALL else f"{gpus.count} GPUs"
            return (), (
                f"The container has {which}, and NVML cannot be asked from here which those are: set "
                "shards.*.gpus and tp, or docker.topology."
            )
        return _seen(tuple(host if gpus.count == ALL else host[: gpus.count]), visible)
    found = [_uuid(name, host) for name in gpus.named]
    unknown = [name for name, uuid in zip(gpus.named, found, strict=True) if not uuid]
    if unknown:
        return (), f"The container has the GPUs {', '.join(unknown)}, whose UUIDs nothing here can tell."
    return _seen(tuple(found), visible)


def _uuid(name: str, host: Sequence[str] | None) -> str:
    """Empty for an index, or the beginning of a UUID, that nothing here resolves."""
    plain = name.removeprefix(CDI)
    if plain.isdecimal():
        if host is None:
            return name if name != plain else ""  # the name in CDI is good as it is
        return host[int(plain)] if int(plain) < len(host) else ""
    if plain.startswith("GPU-") and host is not None:
        return next((uuid for uuid in host if uuid.startswith(plain)), "")
    return plain if plain.startswith(("GPU-", "MIG-")) else ""


def _seen(names: tuple[str, ...], visible: str | None) -> tuple[tuple[str, ...], str]:
    """Of the container's GPUs those that its processes see; inside they are counted from 0."""
    if not visible or not names:
        return names, ""
    words = [word.strip() for word in visible.split(",")]
    if all(word.isdecimal() and int(word) < len(names) for word in words):
        return tuple(names[int(word)] for word in words), ""
    if all(word in names for word in words):
        return tuple(words), ""
    return (), "The container's CUDA_VISIBLE_DEVICES names GPUs that it does not have."
