"""Two containers of the shard image, and what they prove to each other."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import docker

from orchestrator.core.bandwidth import Measured
from orchestrator.deployment.doctor import proofs
from orchestrator.deployment.doctor.finding import Finding, failed
from orchestrator.deployment.doctor.host import arenas_finding
from orchestrator.deployment.doctor.lab import KEY_FILE, Ended, Lab, Sandbox, last_line
from orchestrator.errors import OrchestratorError, ShardError
from orchestrator.shards.docker.engine import Engine, Gone
from orchestrator.shards.docker.names import ARENAS
from tgi_patches.peer.records import GIVER, ring_bytes

WAYS = ("arena", "pull", "gloo", "nccl")
RINGS = 3
"""Of the writer, of the second process beside the reader, and of what was pulled."""
SPARE_BYTES = 16 * 2**20
"""Headers and indices of their files."""
LOOK_S = 60.0
START_S = 60.0
MEASURE_S = 240.0
EMBEDDED = ("python", "-I", "-m", "tgi_patches.peer")
"""In the image of the embedded shard."""
TGI = ("/usr/src/.venv/bin/python", "-P", "-m", "tgi_patches.peer")
"""TGI's own interpreter, which has torch and writes the arenas; the overlay is not in its environment."""
OLD_IMAGE = "No module named"
OVERLAY = {"PYTHONPATH": "/opt/tgi-orchestrator/overlay"}


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much is measured."""

    size_bytes: int = 16 * 2**20
    count: int = 11


FULL, QUICK = Rounds(), Rounds(4 * 2**20, 5)


@dataclass(frozen=True, slots=True)
class Ground:
    """What the two containers stand on."""

    image: str
    tgi: bool
    """The image is TGI with the overlay."""
    network: str
    """`host`, or an existing one; empty makes one."""
    volume: str
    """The deployment's own; empty, or one without room, makes one."""
    gpus: tuple[str, ...] = ()
    """Two that nobody uses, for NCCL; else why there are none is in `no_gpus`."""
    no_gpus: str = "there are no GPUs here"

    @property
    def command(self) -> tuple[str, ...]:
        return TGI if self.tgi else EMBEDDED

    def peer(self, what: str, told: Mapping[str, Any], **options: Any) -> Sandbox:
        env = OVERLAY if self.tgi else {}
        return Sandbox(self.image, (*self.command, what, json.dumps(told)), env, **options)


@dataclass(slots=True)
class Proved:
    """What was found, and the transports that are proved."""

    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    look: Mapping[str, Any] = field(default_factory=dict)
    """What a container sees of itself."""

    def add(self, transport: str, found: tuple[Finding, Measured | None]) -> None:
        finding, measured = found
        self.findings.append(finding)
        if measured is not None:
            self.measured[transport] = measured


async def prove(engine: Engine, token: str, ground: Ground, rounds: Rounds) -> Proved:
    """Never raises for what may be wrong with a host; everything that it made is gone afterwards."""
    proved = Proved()
    try:
        async with Lab(engine, token) as lab:
            await _proved(lab, engine, token, ground, rounds, proved)
    except OrchestratorError as error:
        do = f"Build the image {ground.image} again: it is older than this program."
        if OLD_IMAGE not in str(error):
            do = "Correct that, and run doctor again; `docker logs` and the engine's own log say more."
        proved.findings.append(failed("transports", str(error), do))
        proved.findings.extend(proofs.not_run(dict.fromkeys(WAYS, "The containers did not do their work.")))
    return proved


async def _proved(
    lab: Lab, engine: Engine, token: str, ground: Ground, rounds: Rounds, proved: Proved
) -> None:
    network = ground.network or await lab.network()
    needed = RINGS * ring_bytes(rounds.size_bytes) + SPARE_BYTES
    existing = bool(ground.volume) and await _there(engine, ground.volume)
    volume = ground.volume if existing else await lab.volume(needed)
    look = proved.look = await _look(lab, ground, volume)
    proved.findings.append(arenas_finding(look, volume, existing=existing))
    if existing and 0 < look["arenas"].get("free_bytes", 0) < needed:
        existing, volume = False, await lab.volume(needed)
    try:
        facts = await measured(lab, ground, rounds, network, (volume, volume))
    finally:
        if existing:
            told = {"arenas": ARENAS, "name": folder_name(token)}
            await lab.ended("sweep", ground.peer("sweep", told, volume=volume), LOOK_S)
    judge(facts, proved, host_network=network == "host", no_gpus="" if ground.gpus else ground.no_gpus)


def folder_name(token: str) -> str:
    """In the arenas."""
    return f"doctor-{token}"


async def measured(
    lab: Lab, ground: Ground, rounds: Rounds, network: str, volumes: tuple[str, str]
) -> Mapping[str, Any]:
    """The facts of `tgi_patches.peer.measure`; `volumes` at the arenas of the giver and of the taker.

    Raises ShardError where an end does not do its work.
    """
    host, key = ("127.0.0.1" if network == "host" else "0.0.0.0"), secrets.token_hex(32).encode()
    name = folder_name(lab.token)
    told = {"arenas": ARENAS, "name": name, "key_file": KEY_FILE, "size_bytes": rounds.size_bytes}
    giver = ground.peer(
        "serve",
        told | {"shard": GIVER, "host": host},
        network=network,
        volume=volumes[0],
        gpus=ground.gpus[:1],
        key=key,
    )
    running = await lab.start("a", giver)
    port = json.loads(await lab.first_line(running, START_S))["port"]
    address = host if network == "host" else await lab.address(running, network)
    taker = ground.peer(
        "measure",
        told | {"address": f"{address}:{port}", "rounds": rounds.count, "ways": list(_ways(ground))},
        network=network,
        volume=volumes[1],
        gpus=ground.gpus[1:2],
        key=key,
    )
    facts = _answer(await lab.ended("b", taker, MEASURE_S), "second container")
    if "error" in facts:
        raise ShardError(str(facts["error"]))
    return facts


def judge(facts: Mapping[str, Any], proved: Proved, *, host_network: bool, no_gpus: str) -> None:
    """Findings of all transports from what was measured."""
    size, hosts = facts["kv_bytes"], facts["hosts"]
    proved.add("arena", proofs.arena_finding(facts["arena"], size))
    proved.add("pull", proofs.pull_finding(facts["pull"], size, host_network=host_network, hosts=hosts))
    proved.add("gloo", proofs.gloo_finding(facts["gloo"], size, host_network=host_network, hosts=hosts))
    nccl = facts.get("nccl", {"skipped": no_gpus})
    proved.add("nccl", proofs.nccl_finding(nccl, size))


def _ways(ground: Ground) -> Sequence[str]:
    return WAYS if len(ground.gpus) > 1 else WAYS[:-1]


async def _look(lab: Lab, ground: Ground, volume: str) -> Mapping[str, Any]:
    ended = await lab.ended("look", ground.peer("look", {"arenas": ARENAS}, volume=volume), LOOK_S)
    return _answer(ended, f"container of {ground.image}")


def _answer(ended: Ended, who: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(ended.output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = last_line(ended.errors or ended.output)
        raise ShardError(f"The {who} ended with code {ended.code}: {said}.") from None
    return found


async def _there(engine: Engine, volume: str) -> bool:
    def look(client: docker.DockerClient) -> bool:
        return bool(client.volumes.get(volume))

    try:
        return await engine.call("The volume cannot be looked at", look)
    except Gone:
        return False
