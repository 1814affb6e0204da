"""The host beside its GPUs: memory for the arenas, /dev/shm, disk, ports, Redis, images, the hub.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.deployment.doctor.finding import Finding, failed, ok, skipped, warning
from orchestrator.shards.docker.names import ARENAS, CPU_IMAGE, ENGINE_LABEL, TGI_LABEL, USER

VERSION_LABEL = "org.opencontainers.image.version"
TIGHT = 0.8
"""Of what is free: beyond it there is a warning."""
DISK_LEAST_BYTES = 2**30
DISK_ROOM_BYTES = 20 * 2**30
"""TGI's image, and a second one beside it while it is replaced."""
REDIS_LEAST = (6, 2)
RANKS_SHM_BYTES = 256 * 2**20
"""NCCL's buffers between the ranks of a container do not fit into less."""
ARENA_MODE = "2770"


# --- memory -------------------------------------------------------------------------------------


def memory_finding(needed_bytes: int, free_bytes: int, *, runs: bool = False) -> Finding:
    """`needed_bytes` of all arenas together; `runs`: they are there already."""
    name = "memory"
    figures = {"arenas_bytes": needed_bytes, "free_bytes": free_bytes}
    told = f"The KV arenas need {_gib(needed_bytes)} GiB and {_gib(free_bytes)} GiB of memory are free"
    if runs:
        return ok(name, f"The deployment runs: its arenas of {_gib(needed_bytes)} GiB are there.", **figures)
    do = (
        "Lower arena.bytes, arena.pinned_bytes or limits.max_input_tokens, or stop what else uses the memory."
    )
    if needed_bytes > free_bytes:
        return failed(name, f"{told}.", do, **figures)
    if needed_bytes > TIGHT * free_bytes:
        return warning(name, f"{told}: little is left for the shards themselves.", do, **figures)
    return ok(name, f"{told}.", **figures)


def unknown_memory(why: str, free_bytes: int) -> Finding:
    return skipped("memory", f"What the arenas need is not known yet: {why}.", free_bytes=free_bytes)


def arenas_finding(look: Mapping[str, Any], volume: str, *, existing: bool) -> Finding:
    """`look` of a container that has the volume at /arenas; `existing`: it is the deployment's own."""
    name = "arenas"
    arenas: Mapping[str, Any] = look["arenas"]
    figures = {"volume": volume, "existing": existing, **arenas}
    remove = f"Stop the deployment and remove the volume {volume}: `up` makes it anew as it must be."
    if not arenas["there"]:
        return failed(name, f"A container sees no {ARENAS}: {arenas['fault']}.", remove, **figures)
    if arenas["kind"] != "tmpfs":
        kind = arenas["kind"] or "nothing"
        return failed(name, f"At {ARENAS} {kind} is mounted in place of a tmpfs.", remove, **figures)
    if arenas["fault"]:
        return failed(name, str(arenas["fault"]), remove, **figures)
    owner = f"{arenas['uid']}:{arenas['gid']} {arenas['mode']}"
    if not arenas["writable"]:
        return failed(name, f"Shards cannot write to {ARENAS} ({owner}).", remove, **figures)
    if owner != f"{USER}:{USER} {ARENA_MODE}":
        told = f"{ARENAS} belongs to {owner} in place of {USER}:{USER} {ARENA_MODE}."
        return warning(name, told, remove, **figures)
    what = "the deployment's volume" if existing else "a volume made for this"
    return ok(name, f"Containers see a tmpfs of {owner} at {ARENAS} ({what}).", **figures)


def shm_finding(default_bytes: int, ranks: int, wanted_bytes: int) -> Finding:
    """`ranks` of the largest shard; `wanted_bytes`: shm_bytes of the settings, 0 where they say nothing."""
    name = "shm"
    figures = {"default_bytes": default_bytes, "ranks": ranks, "shm_bytes": wanted_bytes}
    default = f"A container's /dev/shm has {default_bytes >> 20} MiB unless told otherwise"
    if ranks > 1 and 0 < wanted_bytes < RANKS_SHM_BYTES:
        return warning(
            name,
            f"A shard of {ranks} ranks gets a /dev/shm of {wanted_bytes >> 20} MiB, too little for NCCL.",
            "Leave shm_bytes out (1 GiB for several ranks), or raise it to 1 GiB.",
            **figures,
        )
    if ranks > 1:
        return ok(name, f"{default}; shards of several ranks are told.", **figures)
    return ok(name, f"{default}; arenas are not in it, and a shard of one rank needs no more.", **figures)


def disk_finding(root: str, free_bytes: int | None) -> Finding:
    """`free_bytes` of where the engine keeps images; None where that cannot be seen from here."""
    name = "disk"
    figures = {"root": root, "free_bytes": free_bytes}
    if free_bytes is None:
        return skipped(name, f"The engine's folder {root} cannot be seen from here.", **figures)
    told = f"{_gib(free_bytes)} GiB are free where the engine keeps images ({root})"
    do = "Remove images that nobody uses: `docker image prune`."
    if free_bytes < DISK_LEAST_BYTES:
        return failed(name, f"Only {told}.", do, **figures)
    if free_bytes < DISK_ROOM_BYTES:
        return warning(name, f"{told}: TGI's image needs more.", do, **figures)
    return ok(name, f"{told}.", **figures)


# --- what a deployment talks to -----------------------------------------------------------------


def port_finding(key: str, listen: str, fault: str, *, ours: bool) -> Finding:
    """`fault`: why the address cannot be listened on; `ours`: by the deployment that runs."""
    figures = {"listen": listen, "ours": ours}
    if ours:
        return ok(f"port {key}", f"The deployment that runs listens at {listen}.", **figures)
    if fault:
        return failed(
            f"port {key}",
            f"Nobody can listen at {listen}: {fault}.",
            f"Name another address in {key}, or stop what listens there.",
            **figures,
        )
    return ok(f"port {key}", f"{listen} is free.", **figures)


def redis_finding(where: str, version: str, fault: str) -> Finding:
    """`where` without a password; `version` as INFO has it; `fault`: why it does not answer."""
    figures = {"url": where, "version": version}
    if fault:
        return failed(
            "redis",
            f"The Redis at {where} does not answer: {fault}.",
            "Start it, or correct redis.url.",
            **figures,
        )
    return _redis_version(f"The Redis at {where}", version, "Upgrade it.", figures)


def own_redis_finding(path: str, version: str, fault: str) -> Finding:
    """Of the binary that `up` would start where redis.url names none."""
    figures = {"binary": path, "version": version}
    if fault:
        return failed("redis", fault, "Install redis-server, or name a Redis in redis.url.", **figures)
    return _redis_version(f"`up` starts {path}, which", version, "Install a newer redis-server.", figures)


def _redis_version(what: str, version: str, do: str, figures: Mapping[str, Any]) -> Finding:
    least = ".".join(map(str, REDIS_LEAST))
    if _version(version) < REDIS_LEAST:
        told = f"{what} is of version {version or 'unknown'}; {least} is needed."
        return failed("redis", told, do, **figures)
    return ok("redis", f"{what} is of version {version}.", **figures)


def _version(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(".") if part.isdecimal()]
    return tuple(map(int, parts))


# --- images and the hub -------------------------------------------------------------------------


def image_finding(image: str, labels: Mapping[str, str] | None, own_version: str, *, wanted: bool) -> Finding:
    """`labels` None for one that is not there; `wanted`: the settings launch containers of it."""
    name = f"image {image}"
    if labels is None:
        told, do = f"The engine has no image {image}.", f"Build it: {_build(image)}."
        return (
            failed(name, told, do) if wanted else warning(name, told, f"For `launcher: docker`, {_lower(do)}")
        )
    found = labels.get(VERSION_LABEL, "")
    tgi, embedded = labels.get(TGI_LABEL, ""), labels.get(ENGINE_LABEL) == "embedded"
    figures = {"version": found, "tgi": tgi, "embedded": embedded}
    if not tgi and not embedded:
        told = (
            f"The image {image} runs no shard of ours: it has neither label {TGI_LABEL} nor {ENGINE_LABEL}."
        )
        return failed(name, told, "Name another one in docker.image, or leave the choice out.", **figures)
    kind = f"TGI {tgi} with the overlay" if tgi else "the embedded shard"
    if found not in (own_version, "", "unknown"):
        return warning(
            name,
            f"The image {image} is of version {found}, this program of {own_version}.",
            f"Build it again: {_build(image)}.",
            **figures,
        )
    return ok(name, f"The engine has {image}: {kind}.", **figures)


def _build(image: str) -> str:
    if image.partition(":")[0].endswith(CPU_IMAGE):
        return f"`docker build -f compose/Dockerfile --target cpu -t {image} .`"
    return f"`docker build -f tgi_patches/Dockerfile -t {image} .`"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


@dataclass(frozen=True, slots=True)
class HubFacts:
    """What is known of the way to a model."""

    endpoint: str
    model: str
    local: bool
    """A folder."""
    cached: bool
    answers: bool
    offline: bool
    """HF_HUB_OFFLINE is set."""
    packaged: bool = False
    """The default model, which a package ships, too."""
    token_file: str = ""
    token_fault: str = ""
    """Why it cannot be read."""
    token_open: bool = False
    """Others may read it."""


def hub_finding(facts: HubFacts) -> Finding:
    name = "hub"
    figures = {
        "endpoint": facts.endpoint,
        "answers": facts.answers,
        "cached": facts.cached,
        "local": facts.local,
    }
    if facts.token_fault:
        return failed(name, facts.token_fault, "Correct model.token_file, or leave it out.", **figures)
    if facts.token_open:
        return warning(
            name,
            f"Others may read the token in {facts.token_file}.",
            f"`chmod 600 {facts.token_file}`.",
            **figures,
        )
    if facts.local:
        return ok(name, f"The model is the folder {facts.model}: the hub is not needed.", **figures)
    if facts.answers and not facts.offline:
        return ok(name, f"The hub answers at {facts.endpoint}.", **figures)
    why = (
        "HF_HUB_OFFLINE is set" if facts.offline else f"the hub ({facts.endpoint}) does not answer within 3 s"
    )
    if facts.cached:
        told = f"{why[0].upper()}{why[1:]}: the copy of {facts.model} in the cache is used."
        return warning(name, told, "Nothing, as long as that copy is the revision you want.", **figures)
    if facts.packaged:
        told = f"{why[0].upper()}{why[1:]}: `up` makes {facts.model} from the package that ships it."
        return warning(name, told, "Nothing, where a package index answers.", **figures)
    return failed(
        name,
        f"The model {facts.model} is not in the cache and {why}.",
        "Check the network or HF_ENDPOINT, or name a local folder in model.id.",
        **figures,
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
