"""Who has which GPU, and who gives way."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.gpu_claims import Claim, refusal
from orchestrator.core.order import ShardOrder
from orchestrator.errors import ShardError
from orchestrator.shards.docker.ledger import claims_of, nanoseconds
from orchestrator.shards.docker.order_label import written
from tgi_patches.contract import Role

CREATED = "2026-11-30T16:16:53.123456789Z"
CREATED_NS = 1_796_055_413_123_456_789
ALIASES = {"0": "GPU-zero", "1": "GPU-one"}


def container(
    requests: list[dict[str, Any]] | None = None,
    *,
    env: tuple[str, ...] = (),
    runtime: str = "runc",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "Id": "f00",
        "Name": "/box",
        "Created": CREATED,
        "Config": {"Env": list(env), "Labels": labels or {}},
        "HostConfig": {"DeviceRequests": requests, "Runtime": runtime},
    }


def request(*ids: str, count: int = 0, driver: str = "") -> dict[str, Any]:
    capabilities = [] if driver == "cdi" else [["gpu"]]
    return {"Driver": driver, "Count": count, "DeviceIDs": list(ids) or None, "Capabilities": capabilities}


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        (container(), []),
        (container([request("GPU-a", "GPU-b", "GPU-a")]), ["GPU-a", "GPU-b"]),
        (container([request("MIG-a")]), ["MIG-a"]),
        (container([request("0", "2")]), ["GPU-zero", "2"]),
        (container([request(count=-1)]), ["all"]),
        (container([request(count=2)]), ["GPU-zero", "GPU-one"]),
        (
            container([request("nvidia.com/gpu=1", "nvidia.com/gpu=GPU-b", driver="cdi")]),
            ["GPU-one", "GPU-b"],
        ),
        (container([request("nvidia.com/gpu=all", driver="cdi")]), ["all"]),
        (container([request("amd.com/gpu=0", driver="cdi")]), ["amd.com/gpu=0"]),
        (container([{"Driver": "", "Count": -1, "Capabilities": [["tpu"]]}]), []),
        # The variable counts where a runtime of NVIDIA's reads it, or where it names a GPU for certain.
        (container(env=("NVIDIA_VISIBLE_DEVICES=all",)), []),
        (container(env=("NVIDIA_VISIBLE_DEVICES=all",), runtime="nvidia"), ["all"]),
        (container(env=("NVIDIA_VISIBLE_DEVICES=void",), runtime="nvidia"), []),
        (container(env=("NVIDIA_VISIBLE_DEVICES=0,GPU-b",), runtime="nvidia"), ["GPU-zero", "GPU-b"]),
        (container(env=("NVIDIA_VISIBLE_DEVICES=GPU-b, MIG-c",)), ["GPU-b", "MIG-c"]),
        # A request of the API is what the engine goes by.
        (container([request("GPU-a")], env=("NVIDIA_VISIBLE_DEVICES=all",), runtime="nvidia"), ["GPU-a"]),
    ],
)
def test_a_container_has_the_gpus_that_it_was_given(told: dict[str, Any], gpus: list[str]) -> None:
    assert [claim.gpu for claim in claims_of(told, ALIASES)] == gpus


def test_of_ours_the_share_is_told_and_of_others_what_the_engine_knows() -> None:
    order = ShardOrder("demo", "d0", Role.DECODE, "m", "n", mps_percent=30, gpu_memory_fraction=0.25)
    labels = {"tgi-orchestrator.deployment": "demo", "tgi-orchestrator.spec": written(order)}
    (ours,) = claims_of(container([request("GPU-a")], labels=labels), {})
    assert ours == Claim("GPU-a", "box", "demo", 30, 0.25, CREATED_NS, "f00")
    (theirs,) = claims_of(container([request("GPU-a")]), {})
    assert theirs == Claim("GPU-a", "box", "", 0, 0.0, CREATED_NS, "f00")
    labels["tgi-orchestrator.spec"] = "broken"
    (strange,) = claims_of(container([request("GPU-a")], labels=labels), {})
    assert (strange.deployment, strange.mps_percent) == ("demo", 0)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        (CREATED, CREATED_NS),
        ("2026-11-30T16:16:53.1Z", 1_796_055_413_100_000_000),
        ("2026-11-30T16:16:53Z", 1_796_055_413_000_000_000),
        ("2026-11-30T17:16:53.5+01:00", 1_796_055_413_500_000_000),
        ("2026-11-30T11:46:53-04:30", 1_796_055_413_000_000_000),
    ],
)
def test_the_engines_moments_are_read_to_the_nanosecond(moment: str, expected: int) -> None:
    assert nanoseconds(moment) == expected


def test_a_moment_that_is_none_is_told() -> None:
    with pytest.raises(ShardError, match="moment"):
        nanoseconds("yesterday")


# --- who gives way ------------------------------------------------------------------------------

MINE = Claim("GPU-a", "tgio-demo-d0", "demo", created_ns=20, container_id="m")


@pytest.mark.parametrize(
    ("mine", "held", "sentence"),
    [
        (MINE, [], ""),
        (MINE, [Claim("GPU-b", "x", created_ns=1, container_id="x")], ""),
        (MINE, [Claim("GPU-a", "x", created_ns=21, container_id="x")], ""),
        (
            MINE,
            [Claim("GPU-a", "x", created_ns=19, container_id="x")],
            "The GPU GPU-a is taken by the container x.",
        ),
        (
            MINE,
            [Claim("GPU-a", "tgio-two-p0", "two", created_ns=19, container_id="x")],
            "The GPU GPU-a is taken by the container tgio-two-p0 of deployment two.",
        ),
        # Created in the same nanosecond: the smaller id stays.
        (MINE, [Claim("GPU-a", "x", created_ns=20, container_id="l")], "is taken by the container x."),
        (MINE, [Claim("GPU-a", "x", created_ns=20, container_id="n")], ""),
        (MINE, [Claim("all", "x", created_ns=1, container_id="x")], "x, which has all GPUs of this host."),
        (MINE, [Claim("3", "x", created_ns=1, container_id="x")], "the GPU of index 3, and which that is"),
        (MINE, [Claim("amd.com/gpu=0", "x", created_ns=1, container_id="x")], ""),
        (
            replace(MINE, mps_percent=50, memory_fraction=0.5),
            [Claim("GPU-a", "x", "two", 50, 0.5, 1, "x")],
            "",
        ),
        (
            replace(MINE, mps_percent=51, memory_fraction=0.5),
            [Claim("GPU-a", "x", "two", 50, 0.5, 1, "x")],
            "50 % of its threads and 0.5 of its memory are taken, and 51 % and 0.5 more do not fit.",
        ),
        (
            replace(MINE, mps_percent=10, memory_fraction=0.51),
            [Claim("GPU-a", "x", "two", 50, 0.5, 1, "x")],
            "and 10 % and 0.51 more do not fit.",
        ),
        (
            replace(MINE, mps_percent=10, memory_fraction=0.1),
            [Claim("GPU-a", "x", created_ns=1, container_id="x")],
            "is taken by the container x.",
        ),
        (MINE, [Claim("GPU-a", "x", "two", 50, 0.5, 1, "x")], "x of deployment two, which shares it."),
    ],
)
def test_the_younger_container_gives_way_unless_both_shares_fit(
    mine: Claim, held: list[Claim], sentence: str
) -> None:
    told = refusal([mine], [mine, *held])
    assert sentence in told
    assert bool(told) == bool(sentence)


def test_three_thirds_fit_whatever_their_sum_in_floats_is() -> None:
    held = [Claim("GPU-a", f"c{n}", "d", 33, 0.1 * 3.3334 / 3.3334 + 0.2333333, n, f"c{n}") for n in range(2)]
    third = replace(MINE, mps_percent=34, memory_fraction=1 - 2 * held[0].memory_fraction)
    assert refusal([third], [third, *held]) == ""


SHARE = st.sampled_from([(0, 0.0), (30, 0.3), (50, 0.5), (60, 0.4), (100, 1.0)])


@given(
    data=st.lists(st.tuples(st.sampled_from(["GPU-a", "GPU-b", "all"]), SHARE, st.integers(0, 3)), max_size=5)
)
def test_of_all_that_come_at_once_those_that_go_on_never_exceed_a_gpu(data: list[Any]) -> None:
    claims = [
        Claim(gpu, f"c{n}", "d", percent, fraction, created, f"c{n}")
        for n, (gpu, (percent, fraction), created) in enumerate(data)
    ]
    on = [claim for claim in claims if not refusal([claim], claims)]
    for gpu in ("GPU-a", "GPU-b"):
        here = [claim for claim in on if claim.gpu in (gpu, "all")]
        if any(claim.mps_percent == 0 for claim in here):
            assert len(here) == 1
        assert sum(claim.mps_percent for claim in here) <= 100
        assert sum(claim.memory_fraction for claim in here) <= 1.0001
    if claims:
        assert min(claims, key=lambda claim: claim.age) in on, "the oldest always goes on"


def test_the_order_in_which_the_engine_lists_does_not_matter() -> None:
    claims = [
        replace(MINE, container_id=one, created_ns=moment) for one, moment in (("a", 2), ("b", 1), ("c", 1))
    ]
    for listed in permutations(claims):
        assert [claim.container_id for claim in claims if not refusal([claim], listed)] == ["b"]
