"""All checks in order: the engine, the machine around it, its images, then two real containers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from orchestrator.config import Loaded
from orchestrator.core.bandwidth import Bandwidths, Measured
from orchestrator.core.topology import Topology
from orchestrator.deployment.bandwidths import write_bandwidths
from orchestrator.deployment.containers import image_of
from orchestrator.deployment.doctor import gather, host, proofs
from orchestrator.deployment.doctor.asked import free_gpus, labels_of, network_of, seen_inside
from orchestrator.deployment.doctor.engine import (
    engine_finding,
    no_engine,
    refused_engine,
    reload_finding,
    runtime_finding,
)
from orchestrator.deployment.doctor.finding import Finding, Report, failed, ok, skipped, warning
from orchestrator.deployment.doctor.lab import new_token
from orchestrator.deployment.doctor.machine import ROLES, Say, gpu_findings, host_findings, sections
from orchestrator.deployment.doctor.transports import FULL, WAYS, Ground, Rounds, prove
from orchestrator.deployment.state import StateFolder
from orchestrator.errors import ConfigError, OrchestratorError, Unreachable
from orchestrator.settings import RoleSection, Settings
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.names import TGI_LABEL, volume_name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be looked at."""

    loaded: Loaded
    fault: str = ""
    """Why the settings cannot be used: then `loaded` has the defaults."""
    image: str = ""
    """In place of those of the settings."""
    rounds: Rounds = FULL

    @property
    def settings(self) -> Settings:
        return self.loaded.settings


async def examined(wanted: Wanted, say: Say) -> Report:
    """Never raises for what may be wrong with the machine."""
    settings = wanted.settings
    say("GPUs and the engine")
    topology, fault = await asyncio.to_thread(gather.topology_of, settings)
    gpus = gpu_findings(settings, topology, fault)
    findings, unreachable = [settings_finding(wanted)], False
    try:
        engine = await Engine.connect(settings.docker.host)
    except (Unreachable, ConfigError) as error:
        unreachable = isinstance(error, Unreachable)
        findings.append(no_engine(str(error)) if unreachable else refused_engine(str(error)))
        findings += [*gpus, *await host_findings(wanted.loaded, None, say)]
        why = "No engine answers" if unreachable else "This engine cannot run shards"
        findings += not_proved(f"{why}: nothing can be proved between containers.")
    else:
        try:
            findings += await _with_engine(wanted, engine, topology, gpus, say)
        finally:
            await engine.aclose()
    return Report(settings.deployment, findings, unreachable, bool(wanted.fault))


def settings_finding(wanted: Wanted) -> Finding:
    if wanted.fault:
        return failed("settings", wanted.fault, "Correct that; the rest was checked with the defaults.")
    settings = wanted.settings
    numbers = {role: section.shards for role, section in zip(ROLES, sections(settings), strict=True)}
    shards = ", ".join(f"{count} {role}" for role, count in numbers.items() if count)
    told = (
        f"Deployment {settings.deployment!r}, launcher `{settings.launcher}`: {shards}, {settings.model.id}."
    )
    return ok("settings", told, launcher=settings.launcher)


def not_proved(why: str) -> list[Finding]:
    return [skipped("gpus inside", why), *proofs.not_run(dict.fromkeys(WAYS, why))]


async def _with_engine(
    wanted: Wanted, engine: Engine, topology: Topology | None, gpus: list[Finding], say: Say
) -> list[Finding]:
    """What fails on the way is a finding, and the end of those that need the engine."""
    settings, facts = wanted.settings, engine.facts
    count = len(topology.gpus) if topology else 0
    findings = [
        engine_finding(facts, engine.host),
        runtime_finding(facts, count),
        reload_finding(facts, count, gather.char_links() if count else None),
        *gpus,
        *await host_findings(wanted.loaded, engine, say),
    ]
    try:
        images = {image: await labels_of(engine, image) for image in images_of(wanted, topology)}
        launches = settings.launcher == "docker" or bool(wanted.image)
        own = version("tgi-orchestrator")
        findings += [host.image_finding(*image, own, wanted=launches) for image in images.items()]
        there = {image: labels for image, labels in images.items() if labels is not None}
        if not there:
            return [*findings, *not_proved(f"There is no image {next(iter(images))} to start containers of.")]
        image, labels = next(iter(there.items()))
        say("GPUs inside containers")
        findings.append(await seen_inside(engine, image, topology))
        say("what passes between two containers")
        findings += await _transports(wanted, engine, image, TGI_LABEL in labels, topology)
    except OrchestratorError as error:
        findings.append(failed("containers", str(error), "Look at the engine's log, and run doctor again."))
    return findings


def images_of(wanted: Wanted, topology: Topology | None) -> list[str]:
    """Those that shards are launched of; the given one alone where there is one."""
    if wanted.image:
        return [wanted.image]
    launched = [section for section in sections(wanted.settings) if section.count and not section.urls]
    images = [image_of(section, wanted.settings, topology) for section in launched or [RoleSection()]]
    return list(dict.fromkeys(images))


async def _transports(
    wanted: Wanted, engine: Engine, image: str, tgi: bool, topology: Topology | None
) -> list[Finding]:
    settings = wanted.settings
    network, fault = await network_of(settings, engine)
    if fault is not None:
        return [fault, *proofs.not_run(dict.fromkeys(WAYS, "There is no network to prove it on."))]
    free, why = await free_gpus(engine, topology)
    ground = Ground(image, tgi, network, volume_name(settings.deployment), free, why)
    proved = await prove(engine, new_token(), ground, wanted.rounds)
    findings = list(proved.findings)
    if proved.look:
        roles = sections(settings)
        ranks, shm_bytes = max(one.tp for one in roles), max(one.shm_bytes for one in roles)
        findings.append(host.shm_finding(proved.look["shm_bytes"], ranks, shm_bytes))
    if proved.measured:
        findings.append(_kept(settings, engine, proved.measured))
    return findings


def _kept(settings: Settings, engine: Engine, measured: Mapping[str, Measured]) -> Finding:
    """Write down what was proved."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        folder = StateFolder.of(settings.deployment, os.environ)
        write_bandwidths(folder, Bandwidths(when, engine.facts.id, measured))
    except ConfigError as error:
        return warning("bandwidths", str(error), "Make the state folder writable: routing begins untaught.")
    figures = {name: round(one.gb_per_s, 3) for name, one in measured.items()}
    told = f"Routing and placement of {settings.deployment!r} begin with what was measured."
    return ok("bandwidths", told, gb_s=figures)
