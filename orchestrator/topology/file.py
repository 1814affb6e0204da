"""A topology as YAML and back, for hosts whose NVML cannot be asked and for tests; strict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from orchestrator.core.topology import (
    FAST,
    Bandwidth,
    Gpu,
    Link,
    LinkKind,
    MigSlice,
    Topology,
    every_pair,
    untold_link,
)
from orchestrator.errors import ConfigError

NO_NODE = -1
"""How Linux tells that a device has no NUMA node of its own."""


def read_topology(path: Path) -> Topology:
    """ConfigError with one sentence that names the file, the place and the fault."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The topology file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The topology file {path} is not YAML: {' '.join(str(error).split())}.") from None
    try:
        return topology_of(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def topology_of(raw: Any) -> Topology:
    """The topology in parsed YAML; ConfigError names the place and the fault."""
    if not isinstance(raw, dict):
        raise ConfigError("a topology has keys and values, such as `version: 1` and `gpus:`.")
    try:
        return _File.model_validate(raw).topology()
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def as_yaml(topology: Topology) -> str:
    """What `topology_of` reads back as the same topology."""
    told: dict[str, Any] = {"version": 1}
    if topology.driver:
        told["driver"] = topology.driver
    if topology.numa_cpus:
        told["numa"] = {node: _as_ranges(cpus) for node, cpus in topology.numa_cpus.items()}
    told["gpus"] = [_gpu_as_told(gpu) for gpu in topology.gpus]
    if links := list(_links_as_told(topology)):
        told["links"] = links
    if topology.bandwidths:
        told["bandwidths"] = [_bandwidth_as_told(topology, one) for one in topology.bandwidths]
    return yaml.safe_dump(told, sort_keys=False, width=120)


# --- what may stand in the file -------------------------------------------------------------------


def _capability(value: object) -> tuple[int, int]:
    """`8.0`, also where YAML makes it a number."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+\.\d", str(value)):
        raise ValueError("must look like 8.0")
    major, _, minor = str(value).partition(".")
    return int(major), int(minor)


def _cores(value: object) -> tuple[int, ...]:
    """`0-15,32-47`, as Linux lists cores."""
    cores: list[int] = []
    for part in str(value).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("must look like 0-15,32-47")
        cores.extend(range(int(first), int(last if dash else first) + 1))
    if not cores or len(set(cores)) != len(cores):
        raise ValueError("must name each core once")
    return tuple(cores)


Bytes = Annotated[int, Field(gt=0, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Slice(_Part):
    uuid: Text
    profile: Text
    memory_bytes: Bytes
    sm_count: Index = 0


class _Gpu(_Part):
    uuid: Text
    index: Index
    name: Text
    memory_bytes: Bytes
    compute_capability: Annotated[tuple[int, int], BeforeValidator(_capability)]
    sm_count: Index = 0
    numa_node: Annotated[int, Field(ge=NO_NODE, strict=True)] | None = None
    bus_id: str = ""
    mig_mode: Annotated[bool, Field(strict=True)] | None = None
    mig: tuple[_Slice, ...] = ()

    def gpu(self) -> Gpu:
        node = None if self.numa_node == NO_NODE else self.numa_node
        mode = bool(self.mig) if self.mig_mode is None else self.mig_mode
        slices = tuple(MigSlice(**part.model_dump()) for part in self.mig)
        plain = self.model_dump(exclude={"numa_node", "mig_mode", "mig"})
        return Gpu(**plain, numa_node=node, mig_mode=mode, mig=slices)


class _Link(_Part):
    between: Annotated[list[Index], Field(min_length=2)]
    """Indices; every pair among them."""
    kind: LinkKind
    lanes: Index = 0


class _Bandwidth(_Part):
    transport: Text
    gb_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    between: Annotated[list[Index], Field(min_length=2, max_length=2)] | None = None


class _File(_Part):
    version: Literal[1]
    driver: str = ""
    numa: dict[Index, Annotated[tuple[int, ...], BeforeValidator(_cores)]] = {}
    gpus: tuple[_Gpu, ...]
    links: tuple[_Link, ...] = ()
    bandwidths: tuple[_Bandwidth, ...] = ()

    def topology(self) -> Topology:
        gpus = tuple(sorted((one.gpu() for one in self.gpus), key=lambda gpu: gpu.index))
        Topology(gpus, numa_cpus=self.numa)  # says first what is wrong with the GPUs themselves
        links = every_pair(gpus, dict(_pairs(self.links, gpus)))
        bandwidths = tuple(_bandwidth(at, one, gpus) for at, one in enumerate(self.bandwidths))
        return Topology(gpus, links, self.numa, self.driver, bandwidths)


def _pairs(told: tuple[_Link, ...], gpus: tuple[Gpu, ...]) -> Iterator[tuple[tuple[str, str], Link]]:
    seen: set[tuple[str, str]] = set()
    for at, one in enumerate(told):
        fast = one.kind in FAST
        if fast != bool(one.lanes):
            raise ConfigError(
                f"links.{at}: {one.kind} {'needs the number of its lanes' if fast else 'has no lanes'}."
            )
        for a, b in itertools.combinations(sorted(_named(f"links.{at}", one.between, gpus)), 2):
            pair = gpus_by_index(gpus)[a].uuid, gpus_by_index(gpus)[b].uuid
            if pair in seen:
                raise ConfigError(f"links.{at}.between: the link between GPUs {a} and {b} is told already.")
            seen.add(pair)
            yield pair, Link(one.kind, one.lanes)


def _bandwidth(at: int, told: _Bandwidth, gpus: tuple[Gpu, ...]) -> Bandwidth:
    if told.between is None:
        return Bandwidth(told.transport, told.gb_per_s)
    a, b = (gpus_by_index(gpus)[index].uuid for index in _named(f"bandwidths.{at}", told.between, gpus))
    return Bandwidth(told.transport, told.gb_per_s, (a, b))


def _named(where: str, indices: list[int], gpus: tuple[Gpu, ...]) -> list[int]:
    for at, index in enumerate(indices):
        if index not in gpus_by_index(gpus):
            known = ", ".join(map(str, gpus_by_index(gpus)))
            raise ConfigError(f"{where}.between names GPU {index}; there are {known}.")
        if index in indices[:at]:
            raise ConfigError(f"{where}.between names GPU {index} twice.")
    return indices


def gpus_by_index(gpus: tuple[Gpu, ...]) -> Mapping[int, Gpu]:
    return {gpu.index: gpu for gpu in gpus}


# --- faults ---------------------------------------------------------------------------------------


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, a misspelt key before one that is missing; the rest is counted."""
    first, *more = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    where = ".".join(map(str, first["loc"]))
    rest = f" ({len(more)} more)" if more else ""
    if first["type"] == "extra_forbidden":
        return f"there is no key {where!r}{_nearest(first['loc'])}{rest}."
    if first["type"] == "missing":
        return f"{where} is missing{rest}."
    text = first["msg"].removeprefix("Value error, ")
    return f"{where} is {first['input']!r}: {text[0].lower()}{text[1:]}{rest}."


def _nearest(place: tuple[int | str, ...]) -> str:
    """The key that was meant, of those of its section."""
    inside = [part for part in place[:-1] if isinstance(part, str)]
    section: dict[tuple[str, ...], type[_Part]] = {
        (): _File,
        ("gpus",): _Gpu,
        ("gpus", "mig"): _Slice,
        ("links",): _Link,
        ("bandwidths",): _Bandwidth,
    }
    keys = list(section[tuple(inside)].model_fields)
    near = get_close_matches(str(place[-1]), keys, n=1)
    return f"; the nearest one is {near[0]!r}" if near else f"; there are {', '.join(keys)}"


# --- writing --------------------------------------------------------------------------------------


def _gpu_as_told(gpu: Gpu) -> dict[str, Any]:
    told: dict[str, Any] = {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "compute_capability": "{}.{}".format(*gpu.compute_capability),
        "sm_count": gpu.sm_count,
    }
    if gpu.numa_node is not None:
        told["numa_node"] = gpu.numa_node
    if gpu.bus_id:
        told["bus_id"] = gpu.bus_id
    if gpu.mig_mode:
        told["mig_mode"] = True
        told["mig"] = [
            {name: getattr(part, name) for name in ("uuid", "profile", "memory_bytes", "sm_count")}
            for part in gpu.mig
        ]
    return told


def _links_as_told(topology: Topology) -> Iterator[dict[str, Any]]:
    for a, b in itertools.combinations(topology.gpus, 2):
        if (link := topology.link(a, b)) != untold_link(a, b):
            lanes = {"lanes": link.lanes} if link.lanes else {}
            yield {"between": [a.index, b.index], "kind": link.kind.value, **lanes}


def _bandwidth_as_told(topology: Topology, one: Bandwidth) -> dict[str, Any]:
    told: dict[str, Any] = {"transport": one.transport, "gb_per_s": one.gb_per_s}
    if one.between:
        told["between"] = [topology.find(uuid).gpu.index for uuid in one.between]
    return told


def _as_ranges(cores: tuple[int, ...]) -> str:
    """`0-3,8`: the reverse of `_cores`, in the order given."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
