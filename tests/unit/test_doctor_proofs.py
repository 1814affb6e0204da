"""A transport is proved where the bytes came whole and by the way that is claimed; else it is failed.

The facts are those of a run between two containers, and what a fault makes of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from orchestrator.deployment.doctor.finding import Finding, State
from orchestrator.deployment.doctor.proofs import (
    arena_finding,
    gloo_finding,
    nccl_finding,
    pull_finding,
)
from orchestrator.deployment.doctor.transports import Proved, judge

SIZE = 4193280
HOSTS = {"giver": "192.168.80.2", "taker": "192.168.80.3"}
ARENA: dict[str, Any] = {
    "id": ["059348271c8fa4ad87160f1bfbb3f8aa", "059348271c8fa4ad87160f1bfbb3f8aa"],
    "file": [[74, 4], [74, 4]],
    "whole": True,
    "over_neighbour": {"whole": 1.06, "read": 1.05},
    "export_s": {"giver": 0.001, "neighbour": 0.00098},
    "read_s": {"giver": 0.0008, "neighbour": 0.00088},
    "small_s": {"giver": 0.0003, "neighbour": 0.0002},
}
PULL: dict[str, Any] = {
    "whole": True,
    "pulls": 8,
    "served": 8,
    "moved_bytes": 16957440,
    "received_bytes": {"lo": 0, "eth0": 16991944},
    "seconds": 0.056,
    "small_s": 0.024,
}
GLOO: dict[str, Any] = {
    "whole": True,
    "moved_bytes": 16773120,
    "received_bytes": {"lo": 0, "eth0": 16793846},
    "seconds": 0.074,
    "via": [],
}


def pulled(facts: dict[str, Any], *, host_network: bool = False) -> Finding:
    return pull_finding(facts, SIZE, host_network=host_network, hosts=HOSTS)[0]


def test_an_arena_that_both_map_is_proved_with_its_figures() -> None:
    found, measured = arena_finding(ARENA, SIZE)
    assert found.state is State.OK
    assert measured is not None
    # 4193280 bytes in 1.8 ms, of which 0.3 ms are latency
    assert measured.gb_per_s == pytest.approx(2.3296)
    assert measured.latency_s == 0.0003
    assert measured.bytes_per_s == pytest.approx(2.79552e9)
    assert found.figures["gb_s"] == measured.gb_per_s
    assert found.figures["over_processes"] == 1.06
    assert found.figures["read_gb_s"] == pytest.approx(5.2416)
    assert "2.33 GB/s, 1.06x" in found.told


@pytest.mark.parametrize(
    "changes",
    [
        {"id": [ARENA["id"][0], "f" * 32]},
        {"file": [[74, 4], [75, 4]]},
        {"file": [[74, 4], [74, 5]]},
        {"file": [[74, 4], []]},
        {"file": [[], []]},
    ],
)
def test_an_arena_that_is_not_one_is_failed_however_fast(changes: dict[str, Any]) -> None:
    found, measured = arena_finding(ARENA | changes, SIZE)
    assert (found.state, measured) == (State.FAILED, None)
    assert "do not map the same arena" in found.told


def test_without_any_times_two_arenas_are_still_told_apart() -> None:
    bare = {"id": ["a" * 32, "b" * 32], "file": [[74, 4], []]}
    assert "do not map the same arena" in arena_finding(bare, SIZE)[0].told


def test_an_arena_far_slower_than_between_processes_is_a_warning_and_still_measured() -> None:
    slow = copy.deepcopy(ARENA)
    slow["over_neighbour"]["whole"] = 0.7
    found, measured = arena_finding(slow, SIZE)
    assert found.state is State.WARNING
    assert measured is not None


@pytest.mark.parametrize("way", [ARENA, PULL, GLOO])
def test_damaged_content_is_failed_on_every_way(way: dict[str, Any]) -> None:
    broken = way | {"whole": False}
    judged = {
        id(ARENA): lambda: arena_finding(broken, SIZE),
        id(PULL): lambda: pull_finding(broken, SIZE, host_network=False, hosts=HOSTS),
        id(GLOO): lambda: gloo_finding(broken, SIZE, host_network=False, hosts=HOSTS),
    }
    found, measured = judged[id(way)]()
    assert (found.state, measured) == (State.FAILED, None)


def test_a_pull_over_the_network_is_proved() -> None:
    found, measured = pull_finding(PULL, SIZE, host_network=False, hosts=HOSTS)
    assert found.state is State.OK
    assert measured is not None
    assert measured.gb_per_s == pytest.approx(0.07488)
    assert measured.bytes_per_s == pytest.approx(SIZE / 0.032)


@pytest.mark.parametrize(
    "changes",
    [
        {"served": 7},
        {"received_bytes": {"lo": 16991944, "eth0": 4000}},
        {"received_bytes": {"lo": 0}},
        {"received_bytes": {"eth0": 16957439}},
    ],
)
def test_a_pull_whose_bytes_did_not_cross_the_network_is_failed(changes: dict[str, Any]) -> None:
    assert pulled(PULL | changes).state is State.FAILED


def test_one_address_for_both_proves_nothing() -> None:
    same = {"giver": "192.168.80.2", "taker": "192.168.80.2"}
    assert pull_finding(PULL, SIZE, host_network=False, hosts=same)[0].state is State.FAILED
    assert gloo_finding(GLOO, SIZE, host_network=False, hosts=same)[0].state is State.FAILED


def test_on_the_hosts_network_the_loopback_is_the_way_and_said() -> None:
    over_lo = PULL | {"received_bytes": {"lo": 16991944, "eth0": 0}}
    found = pulled(over_lo, host_network=True)
    assert found.state is State.OK
    assert "loopback" in found.told
    assert pulled(PULL, host_network=True).state is State.FAILED


def test_gloo_over_another_way_than_the_network_is_failed() -> None:
    aside = GLOO | {"received_bytes": {"lo": 16793846, "eth0": 100}}
    assert gloo_finding(aside, SIZE, host_network=False, hosts=HOSTS)[0].state is State.FAILED
    assert gloo_finding(GLOO, SIZE, host_network=False, hosts=HOSTS)[0].state is State.OK


@pytest.mark.parametrize(
    ("via", "state", "counts"),
    [
        (["P2P"], State.OK, True),
        (["SHM"], State.WARNING, False),
        (["NET/Socket"], State.WARNING, False),
        (["NET/Socket", "P2P"], State.WARNING, False),
        ([], State.FAILED, False),
    ],
)
def test_nccl_counts_only_where_it_says_that_it_went_from_gpu_to_gpu(
    via: list[str], state: State, counts: bool
) -> None:
    found, measured = nccl_finding(GLOO | {"via": via}, SIZE)
    assert (found.state, measured is not None) == (state, counts)
    assert all(way in found.told for way in via)


def test_what_fails_is_told_with_what_to_do_and_what_is_missing_is_skipped() -> None:
    proved = Proved()
    facts = {
        "kv_bytes": SIZE,
        "hosts": HOSTS,
        "arena": {"error": "error: The arena directory /arenas is writable by everyone"},
        "pull": {"error": "link: no route to host"},
        "gloo": {"skipped": "this image has no torch"},
    }
    judge(facts, proved, host_network=False, no_gpus="there are no GPUs here")
    told = {finding.name: finding for finding in proved.findings}
    assert [told[f"transport {name}"].state for name in ("arena", "pull", "gloo", "nccl")] == [
        State.FAILED,
        State.FAILED,
        State.SKIPPED,
        State.SKIPPED,
    ]
    assert "no route to host" in told["transport pull"].told
    assert "firewall" in told["transport pull"].do
    assert told["transport nccl"].told == "Not tried: there are no GPUs here."
    assert proved.measured == {}


def test_a_pull_does_not_stand_in_for_an_arena() -> None:
    proved = Proved()
    facts = {
        "kv_bytes": SIZE,
        "hosts": HOSTS,
        "arena": ARENA | {"file": [[74, 4], [75, 4]]},
        "pull": PULL,
        "gloo": GLOO,
    }
    judge(facts, proved, host_network=False, no_gpus="none")
    assert sorted(proved.measured) == ["gloo", "pull"]
    assert proved.findings[0].state is State.FAILED
