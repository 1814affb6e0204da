"""What doctor measured is what routing and placement begin with, and nothing more."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from orchestrator.core.bandwidth import Bandwidths, Measured, starting_costs, with_measured
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.costbook import CostBook, profile
from orchestrator.core.ticket import ShardView
from orchestrator.core.topology import Bandwidth, Gpu, Topology
from orchestrator.deployment.bandwidths import FILE, read_bandwidths, write_bandwidths
from orchestrator.deployment.state import StateFolder
from orchestrator.errors import ConfigError
from tgi_patches.contract import Fingerprint, Limits, Role

PRINT = Fingerprint("m", "r", "t", "float32", "float32", layers=2, kv_heads=1, head_dim=8)
ARENA, PULL = Measured(0.0003, 2.5e9, 2.3), Measured(0.004, 1e9, 0.6)
FOUND = Bandwidths("2026-01-02T03:04:05+00:00", "an-engine", {"arena": ARENA, "pull": PULL, "gloo": PULL})
LEARNED = RelayCost(0.01, 1e8)

positive = st.floats(min_value=1e3, max_value=1e14)
measured = st.builds(
    Measured,
    latency_s=st.floats(min_value=0, max_value=60),
    bytes_per_s=positive,
    gb_per_s=st.floats(min_value=1e-9, max_value=1e5),
)


def view(shard: str = "d0", epoch: int = 1) -> ShardView:
    return ShardView(
        shard=shard,
        role=Role.DECODE,
        epoch=epoch,
        url=f"http://{shard}",
        state="ready",
        fingerprint=PRINT,
        limits=Limits(4000, 4096),
        kv_tokens=100_000,
        slots=64,
        ring_bytes=1 << 20,
        record_limit_bytes=1 << 18,
        bytes_per_token=10,
    )


# --- the cost model -----------------------------------------------------------------------------


def test_records_begin_with_the_cost_of_the_way_that_they_take() -> None:
    assert starting_costs(FOUND) == Costs(relay=RelayCost(0.0003, 2.5e9), pull=RelayCost(0.004, 1e9))


def test_what_was_not_proved_is_not_begun_with() -> None:
    assert starting_costs(None) == Costs()
    assert starting_costs(Bandwidths("", "", {"gloo": PULL})) == Costs()
    assert starting_costs(Bandwidths("", "", {"pull": PULL})) == Costs(pull=RelayCost(0.004, 1e9))


def test_a_shard_of_which_nothing_is_known_has_the_starting_costs_alone() -> None:
    book = CostBook().begin_with(starting_costs(FOUND))
    assert book.of(view()) == starting_costs(FOUND)
    assert book.unknown(view()), "prefill and decode are still to be measured"
    assert CostBook().of(view()) is None


def test_what_was_learnt_is_not_replaced() -> None:
    known = Costs(PrefillCost(0.01, 1e-4), DecodeCost(0.02, 0.0, 0.001), relay=LEARNED)
    book = CostBook({profile(view()): known}).begin_with(starting_costs(FOUND))
    costs = book.of(view())
    assert costs is not None
    assert costs.relay == LEARNED
    assert costs.pull == RelayCost(0.004, 1e9)
    assert (costs.prefill, costs.decode) == (known.prefill, known.decode)


def test_the_beginning_is_no_knowledge_that_would_be_kept() -> None:
    book = CostBook().begin_with(starting_costs(FOUND))
    book.calibrated(view(), Costs(prefill=PrefillCost(0.01, 1e-4)))
    (kept,) = book.to_dict()["profiles"].values()
    assert (kept["relay"], kept["pull"]) == (None, None)
    assert kept["prefill"] is not None


def test_a_second_shard_still_learns_from_the_first() -> None:
    book = CostBook().begin_with(starting_costs(FOUND))
    assert book.of(view("d1")) == starting_costs(FOUND)
    book.calibrated(view("d0"), Costs(prefill=PrefillCost(0.01, 1e-4)))
    costs = book.of(view("d1"))
    assert costs is not None
    assert costs.prefill == PrefillCost(0.01, 1e-4)
    assert costs.relay == RelayCost(0.0003, 2.5e9)


def test_costs_that_have_not_changed_are_the_same_object() -> None:
    book = CostBook().begin_with(starting_costs(FOUND))
    first = book.of(view())
    assert book.of(view()) is first
    book.calibrated(view(), Costs(prefill=PrefillCost(0.01, 1e-4)))
    assert book.of(view()) is not first


def test_without_a_measurement_nothing_changes() -> None:
    known = Costs(PrefillCost(0.01, 1e-4), relay=LEARNED)
    book = CostBook({profile(view()): known}).begin_with(starting_costs(None))
    assert book.of(view()) is known


# --- the topology -------------------------------------------------------------------------------


def test_a_topology_gets_what_it_does_not_tell_itself() -> None:
    told = Topology((), bandwidths=(Bandwidth("pull", 9.0),))
    found = with_measured(told, FOUND)
    assert {one.transport: one.gb_per_s for one in found.bandwidths} == {
        "pull": 9.0,
        "arena": 2.3,
        "gloo": 0.6,
    }


def test_a_pair_of_gpus_keeps_its_own_figure_beside_the_hosts() -> None:
    a, b = (Gpu(f"GPU-{name}", at, "H100", 1, (9, 0), 132) for at, name in enumerate("ab"))
    third = Gpu("GPU-c", 2, "H100", 1, (9, 0), 132)
    told = Topology((a, b, third), bandwidths=(Bandwidth("arena", 5.0, ("GPU-a", "GPU-b")),))
    found = with_measured(told, FOUND)
    assert found.bandwidth("arena", a, b) == 5.0
    assert found.bandwidth("arena", a, third) == 2.3


def test_a_topology_without_a_measurement_is_left_alone() -> None:
    assert with_measured(Topology(()), None) == Topology(())


# --- the file -----------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=8), measured, max_size=4), st.text(max_size=8), st.text(max_size=8))
def test_bandwidths_survive_json(transports: dict[str, Measured], when: str, engine: str) -> None:
    found = Bandwidths(when, engine, transports)
    assert Bandwidths.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {"version": 2, "transports": {}},
        {"version": 1},
        {"version": 1, "transports": []},
        {"version": 1, "transports": {"arena": 3}},
        {"version": 1, "transports": {"arena": {"latency_s": 0.1}}},
        {"version": 1, "transports": {"arena": {"latency_s": -1, "bytes_per_s": 1e9, "gb_per_s": 1}}},
        {"version": 1, "transports": {"arena": {"latency_s": 0, "bytes_per_s": 0, "gb_per_s": 1}}},
        {"version": 1, "transports": {"arena": {"latency_s": 0, "bytes_per_s": 1e9, "gb_per_s": 0}}},
        {"version": 1, "transports": {"arena": {"latency_s": 0, "bytes_per_s": 1e9, "gb_per_s": "1"}}},
    ],
)
def test_what_is_no_measurement_is_not_read_as_one(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Bandwidths.from_dict(raw)


def test_the_file_is_private_and_read_back(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert read_bandwidths(folder) is None
    write_bandwidths(folder, FOUND)
    assert read_bandwidths(folder) == FOUND
    assert stat.S_IMODE((folder.path / FILE).stat().st_mode) == 0o600


def test_a_damaged_file_is_told_and_not_believed(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    (tmp_path / FILE).write_text("{")
    with capture_logs() as logs:
        assert read_bandwidths(folder) is None
    assert [line["event"] for line in logs] == ["bandwidths_not_read"]


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigError, match=r"bandwidths\.json cannot be written"):
        write_bandwidths(StateFolder(tmp_path), FOUND)
