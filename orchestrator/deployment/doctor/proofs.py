"""Is a way between two containers proved: the bytes arrived, and went where it says.  Pure.

`facts` are those of `tgi_patches.peer.measure`.  What worked by another way is failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.bandwidth import Measured
from orchestrator.deployment.doctor.finding import Finding, failed, ok, skipped, warning

AIM = 0.95
"""Of the arena between containers against that between processes of one."""
NOISE = 0.1
"""Two processes of one container differ by so much from run to run, by where their pages lie."""
LOOPBACK = "lo"
Facts = Mapping[str, Any]
SHARE_DO = "All shards must mount one tmpfs volume at /arenas: remove what else makes them, and `up` again."
NETWORK_DO = (
    "Check the engine's network and the host's firewall: containers of one network must reach each other."
)


def arena_finding(facts: Facts, kv_bytes: int) -> tuple[Finding, Measured | None]:
    """Both ends mapped one file, and its content came through."""
    name = "transport arena"
    if (fault := _fault(name, facts, SHARE_DO)) is not None:
        return fault, None
    (their_id, own_id), (their_file, own_file) = facts["id"], facts["file"]
    if their_id != own_id or their_file != own_file or not own_file:
        told = "The two containers do not map the same arena: each one has a tmpfs of its own."
        return failed(name, told, SHARE_DO, ids=facts["id"], files=facts["file"]), None
    if not facts["whole"]:
        return failed(
            name, "A record was read that is not what was written.", "Please report this.", **facts
        ), None
    seconds = {end: facts["export_s"][end] + facts["read_s"][end] for end in facts["read_s"]}
    ratio = facts["over_neighbour"]["whole"]
    measured = _law(kv_bytes, seconds["giver"], facts["small_s"]["giver"])
    figures = {
        "gb_s": measured.gb_per_s,
        "processes_gb_s": kv_bytes / seconds["neighbour"] / 1e9,
        "over_processes": ratio,
        "read_over_processes": facts["over_neighbour"]["read"],
        "read_gb_s": kv_bytes / facts["read_s"]["giver"] / 1e9,
        "export_gb_s": kv_bytes / facts["export_s"]["giver"] / 1e9,
        "latency_s": measured.latency_s,
    }
    told = (
        f"Records pass through one arena at {measured.gb_per_s:.2f} GB/s, {ratio:.2f}x of between processes "
        "of one container."
    )
    if ratio < AIM - NOISE:
        do = f"{AIM}x is the aim: run it on a quiet machine; if it stays, give shards cores of one NUMA node."
        return warning(name, told, do, **figures), measured
    return ok(name, told, **figures), measured


def pull_finding(
    facts: Facts, kv_bytes: int, *, host_network: bool, hosts: Mapping[str, str]
) -> tuple[Finding, Measured | None]:
    """The other container served each record, and so many bytes came in over the network."""
    name = "transport pull"
    if (fault := _fault(name, facts, NETWORK_DO)) is not None:
        return fault, None
    if not facts["whole"]:
        return failed(
            name, "A record arrived that is not what was sent.", "Please report this.", **facts
        ), None
    if facts["served"] < facts["pulls"]:
        told = f"Of {facts['pulls']} records the other container has served {facts['served']}."
        return failed(name, told, NETWORK_DO, **facts), None
    if (fault := _detour(name, facts, host_network=host_network, hosts=hosts)) is not None:
        return fault, None
    measured = _law(kv_bytes, facts["seconds"], facts["small_s"])
    told = f"Sidecars fetch records over TCP at {measured.gb_per_s:.2f} GB/s{_where(host_network)}."
    figures = {"gb_s": measured.gb_per_s, "latency_s": measured.latency_s, "hosts": dict(hosts)}
    return ok(name, told, **figures, **_traffic(facts)), measured


def gloo_finding(
    facts: Facts, kv_bytes: int, *, host_network: bool, hosts: Mapping[str, str]
) -> tuple[Finding, Measured | None]:
    name = "transport gloo"
    if (fault := _fault(name, facts, NETWORK_DO)) is not None:
        return fault, None
    if not facts["whole"]:
        return failed(
            name, "gloo delivered something else than was sent.", "Do not use it here.", **facts
        ), None
    if (fault := _detour(name, facts, host_network=host_network, hosts=hosts)) is not None:
        return fault, None
    measured = Measured(0.0, kv_bytes / facts["seconds"], kv_bytes / facts["seconds"] / 1e9)
    told = f"gloo moves tensors at {measured.gb_per_s:.2f} GB/s{_where(host_network)}."
    return ok(name, told, gb_s=measured.gb_per_s, **_traffic(facts)), measured


def nccl_finding(facts: Facts, kv_bytes: int) -> tuple[Finding, Measured | None]:
    """NCCL chooses its way by itself and falls back in silence: what it says that it took is what counts."""
    name = "transport nccl"
    do = "Leave NCCL out: the arena is faster than its ways over host memory and sockets."
    if (fault := _fault(name, facts, do)) is not None:
        return fault, None
    if not facts["whole"]:
        return failed(name, "NCCL delivered something else than was sent.", do, **facts), None
    via = list(facts["via"])
    if not via:
        return failed(
            name, "NCCL does not say which way it took, so that nothing is proved.", do, **facts
        ), None
    measured = Measured(0.0, kv_bytes / facts["seconds"], kv_bytes / facts["seconds"] / 1e9)
    told = f"NCCL moves tensors between two containers via {', '.join(via)} at {measured.gb_per_s:.2f} GB/s"
    if via != ["P2P"]:
        return warning(name, f"{told}: not from GPU to GPU.", do, gb_s=measured.gb_per_s, via=via), None
    return ok(name, f"{told}.", gb_s=measured.gb_per_s, via=via), measured


def not_run(names: Mapping[str, str]) -> list[Finding]:
    """By transport, why."""
    return [skipped(f"transport {name}", why) for name, why in names.items()]


def _fault(name: str, facts: Facts, do: str) -> Finding | None:
    if "skipped" in facts:
        return skipped(name, f"Not tried: {facts['skipped']}.")
    if "error" in facts:
        return failed(
            name, f"It does not work between two containers: {str(facts['error']).rstrip('.')}.", do
        )
    return None


def _detour(name: str, facts: Facts, *, host_network: bool, hosts: Mapping[str, str]) -> Finding | None:
    """A finding where the bytes did not come over the network between the containers."""
    if not host_network and hosts["giver"] == hosts["taker"]:
        return failed(
            name, "Both containers have one address: nothing is proved.", NETWORK_DO, **_traffic(facts)
        )
    came = _came(facts, host_network=host_network)
    if came < facts["moved_bytes"]:
        told = f"{facts['moved_bytes']:,} bytes arrived and only {came:,} came over the network."
        return failed(name, told, "Please report this: the bytes took another way.", **_traffic(facts))
    return None


def _came(facts: Facts, *, host_network: bool) -> int:
    """Bytes that came in; by loopback where both ends are on the host's own network."""
    counted = facts["received_bytes"]
    return max((count for name, count in counted.items() if (name == LOOPBACK) == host_network), default=0)


def _traffic(facts: Facts) -> dict[str, Any]:
    return {"moved_bytes": facts["moved_bytes"], "received_bytes": dict(facts["received_bytes"])}


def _where(host_network: bool) -> str:
    return " over the host's loopback" if host_network else ""


def _law(kv_bytes: int, seconds: float, small_s: float) -> Measured:
    """Latency and bandwidth from a record of one token and a large one."""
    latency_s = min(small_s, seconds / 2)
    return Measured(latency_s, kv_bytes / (seconds - latency_s), kv_bytes / seconds / 1e9)
