"""The driver, the GPUs that NVML knows, and what a container sees of them.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.topology import Topology, separation_problem
from orchestrator.deployment.doctor.finding import Finding, failed, ok, skipped, warning
from orchestrator.errors import ConfigError

LEAST_DRIVER = 525
"""The first one for CUDA 12."""
OWN_DRIVER = 550
"""That of CUDA 12.4, which TGI's image is built with: older ones run it by minor-version compatibility."""
_LISTED = re.compile(r"UUID: ((?:GPU|MIG)-[0-9A-Za-z/-]+)\)")


@dataclass(frozen=True, slots=True)
class Inside:
    """What `nvidia-smi -L` said in a container that was given one GPU."""

    output: str
    ended: int
    """Its exit code; -1 where the engine refused the container."""


def driver_finding(topology: Topology | None, fault: str = "") -> Finding:
    """`fault`: why NVML or the topology file could not be read."""
    name = "driver"
    if fault:
        return failed(
            name,
            fault,
            "Where NVML and driver differ in version, restart the machine; where it cannot be asked, "
            "describe the GPUs in docker.topology.",
        )
    if topology is None or not topology.gpus:
        return skipped(name, "There is no NVIDIA driver here: shards run on CPUs.")
    figures = {
        "driver": topology.driver,
        "gpus": [
            {
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes,
                "compute_capability": ".".join(map(str, gpu.compute_capability)),
                "mig": [part.uuid for part in gpu.mig],
            }
            for gpu in topology.gpus
        ],
    }
    count = len(topology.gpus)
    told = f"Driver {topology.driver or 'of unknown version'} with {count} GPU{'s' * (count > 1)}"
    major = int(found[0]) if (found := re.match(r"\d+", topology.driver)) else 0
    if major and major < LEAST_DRIVER:
        return failed(
            name, f"{told} is older than CUDA 12 needs.", f"Install driver {OWN_DRIVER} or newer.", **figures
        )
    if problems := [problem for gpu in topology.gpus if (problem := separation_problem(gpu))]:
        return warning(name, problems[0], "Use such GPUs for mixed shards only.", **figures)
    if major and major < OWN_DRIVER:
        return warning(
            name,
            f"{told} is older than CUDA 12.4, which TGI's image is built with.",
            f"Install driver {OWN_DRIVER} or newer, unless the image is known to start here.",
            **figures,
        )
    return ok(name, f"{told}: {', '.join(sorted({gpu.name for gpu in topology.gpus}))}.", **figures)


def named_finding(topology: Topology | None, named: Sequence[str]) -> Finding:
    """The GPUs that the settings name are there, each once."""
    name = "gpus named"
    if not named:
        return skipped(name, "The settings name no GPU: placement chooses.")
    if twice := next((gpu for gpu in named if named.count(gpu) > 1), None):
        return warning(
            name,
            f"GPU {twice} is named for two ranks.",
            "Name another one, or share it by mps_percent and gpu_memory_fraction.",
        )
    try:
        for gpu in named:
            (topology or Topology(())).find(gpu)
    except ConfigError as error:
        return failed(name, str(error), "Name GPUs of this host in shards.*.gpus, or leave the choice out.")
    return ok(name, f"All {len(named)} GPUs that the settings name are there.", named=list(named))


def inside_finding(seen: Mapping[str, Inside]) -> Finding:
    """By UUID of the GPU that a container was given: it must see that one and no other."""
    name = "gpus inside"
    figures = {"seen": {uuid: listed(inside.output) for uuid, inside in seen.items()}}
    for uuid, inside in seen.items():
        if inside.ended:
            return failed(
                name,
                f"A container that was given {uuid} cannot use it: {_last(inside.output)}.",
                "Install nvidia-container-toolkit and restart the engine; `docker run --rm --gpus device="
                f"{uuid} ... nvidia-smi -L` must work first.",
                **figures,
            )
        if (found := figures["seen"][uuid]) != [uuid]:
            return failed(
                name,
                f"A container that was given {uuid} sees {', '.join(found) or 'no GPU'}.",
                "Do not set NVIDIA_VISIBLE_DEVICES in the image, and accept device lists from the engine "
                "only (accept-nvidia-visible-devices-envvar-when-unprivileged = false).",
                **figures,
            )
    return ok(name, f"Each of {len(seen)} GPUs is seen inside a container, alone and by its UUID.", **figures)


def listed(output: str) -> list[str]:
    """UUIDs in the output of `nvidia-smi -L`; of a GPU with slices the slices only."""
    found = _LISTED.findall(output)
    slices = [uuid for uuid in found if uuid.startswith("MIG-")]
    return slices or found


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it said nothing"
