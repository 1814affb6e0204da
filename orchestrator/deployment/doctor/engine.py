"""Is this an engine that shards can be launched on, and can it hand GPUs on.  Pure."""

from __future__ import annotations

import dataclasses

from orchestrator.deployment.doctor.finding import Finding, failed, ok, skipped, warning
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.engine import EngineFacts, check_usable

PROCESS_HINT = "without an engine, `launcher: process` serves on this machine as well"
CDI_GPU = "nvidia.com/gpu="
TOOLKIT = (
    "install nvidia-container-toolkit, then `nvidia-ctk runtime configure --runtime=docker` "
    "and restart the engine"
)


def engine_finding(facts: EngineFacts, host: str) -> Finding:
    """Of an engine that answers."""
    figures = {
        "host": host,
        "version": facts.version,
        "api": ".".join(map(str, facts.api)),
        "id": facts.id,
        "cpus": facts.cpus,
        "memory_bytes": facts.memory_bytes,
    }
    try:
        check_usable(facts)
    except ConfigError as error:
        return dataclasses.replace(refused_engine(str(error)), figures=figures)
    return ok(
        "engine",
        f"Docker {facts.version} answers (API {figures['api']}, cgroup v{facts.cgroup_version or '?'} "
        f"by {facts.cgroup_driver or 'none'}).",
        **figures,
    )


def no_engine(reason: str) -> Finding:
    return failed(
        "engine",
        reason,
        "Start it (`systemctl start docker`), or name another one with --host or docker.host; "
        f"{PROCESS_HINT}.",
    )


def refused_engine(reason: str) -> Finding:
    """One that answers and is of no use."""
    return failed("engine", reason, f"Install Docker Engine 19.03 or newer; {PROCESS_HINT}.")


def runtime_finding(facts: EngineFacts, gpus: int) -> Finding:
    """Can it give a container a GPU; `gpus` are those that NVML knows."""
    name = "nvidia runtime"
    figures = {"runtimes": list(facts.runtimes), "cdi": facts.cdi, "devices": list(facts.devices)}
    if not gpus:
        return skipped(name, "No GPU is known here, so that nothing has to be handed on.", **figures)
    if any(device.startswith(CDI_GPU) for device in facts.devices):
        return ok(name, "The engine knows the GPUs by CDI.", **figures)
    if "nvidia" in facts.runtimes:
        return ok(name, "The runtime `nvidia` is registered.", **figures)
    return warning(
        name,
        f"The engine names no runtime `nvidia`{' and no GPU by CDI' if facts.cdi else ''}: it can hand GPUs "
        "on only if nvidia-container-runtime-hook is on its PATH.",
        f"To be sure, {TOOLKIT}.",
        **figures,
    )


def reload_finding(facts: EngineFacts, gpus: int, char_links: bool | None) -> Finding:
    """The known loss of all GPUs of running containers after `systemctl daemon-reload`.

    `char_links`: the GPUs' links in /dev/char, which runc looks for; None where they cannot be seen.
    """
    name = "daemon reload"
    figures = {
        "cgroup_driver": facts.cgroup_driver,
        "cgroup_version": facts.cgroup_version,
        "char_links": char_links,
    }
    if not gpus:
        return skipped(name, "Containers without GPUs lose none.", **figures)
    if facts.cgroup_driver != "systemd":
        return ok(name, "Cgroups are not managed by systemd: a daemon reload takes no GPU away.", **figures)
    if char_links:
        return ok(name, "The GPUs have links in /dev/char: a daemon reload takes none away.", **figures)
    if "nvidia" not in facts.runtimes and any(device.startswith(CDI_GPU) for device in facts.devices):
        return ok(name, "GPUs are handed on by CDI: a daemon reload takes none away.", **figures)
    return warning(
        name,
        f"With cgroup v{facts.cgroup_version} managed by systemd and GPUs injected by the nvidia runtime, "
        "`systemctl daemon-reload` takes the GPUs from running containers.",
        "Run `nvidia-ctk system create-dev-char-symlinks --create-all` (a udev rule repeats it at boot), or "
        'set "exec-opts": ["native.cgroupdriver=cgroupfs"] in /etc/docker/daemon.json, or name GPUs by CDI.',
        **figures,
    )
