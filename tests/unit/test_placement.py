"""Which GPUs shards get on known machines, and when these are served mixed."""

from __future__ import annotations

import pytest

from orchestrator.core.placement import GpuClaim, GpuWish, PlacedShard, fallback, place
from orchestrator.core.topology import Gpu, Topology
from tests.unit.placement_cases import (
    A10,
    BRIDGED,
    DGX,
    GIB,
    H200,
    MIXED,
    decode,
    indices,
    named,
    prefill,
    refusal,
    share,
)
from tgi_patches.contract import Role

# --- where shards go ------------------------------------------------------------------------------


def test_on_a_switched_machine_prefill_groups_spread_over_the_sockets_with_their_decode_shards() -> None:
    placement = place([*prefill(2, tp=2), *decode(4)], DGX)
    assert indices(placement, DGX) == {
        "prefill-0": [0, 1],
        "prefill-1": [4, 5],
        "decode-0": [2],
        "decode-1": [6],
        "decode-2": [3],
        "decode-3": [7],
    }
    assert placement.mixed_because == ""


def test_one_large_group_takes_one_socket_and_decode_the_other() -> None:
    assert indices(place([*prefill(1, tp=4), *decode(4)], DGX), DGX) == {
        "prefill-0": [0, 1, 2, 3],
        "decode-0": [4],
        "decode-1": [5],
        "decode-2": [6],
        "decode-3": [7],
    }


def test_a_group_takes_a_bridged_pair_and_not_neighbours_on_pcie() -> None:
    assert indices(place([*prefill(1, tp=2), *decode(2)], BRIDGED), BRIDGED) == {
        "prefill-0": [0, 2],
        "decode-0": [1],
        "decode-1": [3],
    }


def test_a_decode_shard_goes_to_the_other_end_of_a_bridge() -> None:
    assert indices(place([*prefill(2), *decode(2)], BRIDGED), BRIDGED) == {
        "prefill-0": [0],
        "prefill-1": [1],
        "decode-0": [2],
        "decode-1": [3],
    }


def test_a_decode_group_is_placed_before_a_smaller_prefill_group_which_goes_near_it() -> None:
    wishes = [*prefill(1), *decode(1, tp=2)]
    taken = (GpuClaim("0", "somebody"),)
    assert indices(place(wishes, A10, taken), A10) == {"prefill-0": [1], "decode-0": [2, 3]}
    assert indices(place(wishes, A10), A10) == {"prefill-0": [2], "decode-0": [0, 1]}


def test_on_pcie_each_socket_gets_a_prefill_and_a_decode_shard() -> None:
    placement = place([*prefill(2), *decode(2)], A10)
    assert indices(placement, A10) == {"prefill-0": [0], "prefill-1": [2], "decode-0": [1], "decode-1": [3]}
    assert placement.cpus == {
        "prefill-0": tuple(range(8)),
        "decode-0": tuple(range(8, 16)),
        "prefill-1": tuple(range(16, 24)),
        "decode-1": tuple(range(24, 32)),
    }


def test_a_small_group_leaves_a_large_island_whole() -> None:
    """Islands of 2 and 3: the group of 3 comes later in the order asked for, and still fits."""
    gpus = tuple(Gpu(f"GPU-{n}", n, "A100", 80 * GIB, (8, 0), 108) for n in range(5))
    told = [(0, 1), (0, 2), (1, 2), (3, 4)]
    links = {(f"GPU-{a}", f"GPU-{b}"): BRIDGED.link(BRIDGED.gpus[0], BRIDGED.gpus[2]) for a, b in told}
    wishes = [*prefill(1, tp=2), *decode(1, tp=3)]
    topology = Topology(gpus, links)
    assert indices(place(wishes, topology), topology) == {"prefill-0": [3, 4], "decode-0": [0, 1, 2]}
    one = [GpuWish("mixed-0", Role.MIXED, 2)]
    assert indices(place(one, topology), topology) == {"mixed-0": [3, 4]}


def test_a_chain_of_nvlinks_goes_before_gpus_on_one_pcie_switch() -> None:
    gpus = tuple(Gpu(f"GPU-{n}", n, "A100", 80 * GIB, (8, 0), 108) for n in range(6))
    chain, switch = BRIDGED.link(BRIDGED.gpus[0], BRIDGED.gpus[2]), A10.link(A10.gpus[0], A10.gpus[1])
    links = dict.fromkeys([("GPU-3", "GPU-4"), ("GPU-4", "GPU-5")], chain)
    links |= dict.fromkeys([("GPU-0", "GPU-1"), ("GPU-0", "GPU-2"), ("GPU-1", "GPU-2")], switch)
    topology = Topology(gpus, links)
    assert indices(place([GpuWish("mixed-0", Role.MIXED, 3)], topology), topology) == {"mixed-0": [3, 4, 5]}


def test_a_group_across_sockets_has_cores_of_both() -> None:
    placement = place([GpuWish("mixed-0", Role.MIXED, 4), *decode(0)], A10)
    assert placement.cpus == {"mixed-0": tuple(range(32))}


def test_more_shards_than_cores_share_them() -> None:
    topology = Topology(A10.gpus, A10.links, {0: (5,), 1: (7, 9)})
    placement = place([*prefill(2), *decode(2)], topology)
    assert placement.cpus == {"prefill-0": (5,), "decode-0": (5,), "prefill-1": (7,), "decode-1": (9,)}


def test_where_cores_are_not_known_none_are_given() -> None:
    topology = Topology(A10.gpus, A10.links)
    assert set(place([*prefill(1), *decode(1)], topology).cpus.values()) == {()}


def test_a_shard_that_needs_a_large_gpu_finds_it_although_a_smaller_one_is_asked_for_first() -> None:
    gpus = (
        Gpu("GPU-large", 0, "A100", 80 * GIB, (8, 0), 108),
        Gpu("GPU-small", 1, "A10", 24 * GIB, (8, 6), 72),
    )
    placement = place([*prefill(1, needed_bytes=20 * GIB), *decode(1, needed_bytes=60 * GIB)], Topology(gpus))
    assert placement.gpus == {"prefill-0": ("GPU-small",), "decode-0": ("GPU-large",)}


def test_a_split_gpu_serves_by_its_slices_once_the_whole_ones_are_taken() -> None:
    placement = place([*prefill(1), *decode(2, needed_bytes=8 * GIB)], MIXED)
    assert placement.gpus == {
        "prefill-0": (MIXED.gpus[0].uuid,),
        "decode-0": (MIXED.gpus[1].mig[0].uuid,),
        "decode-1": (MIXED.gpus[1].mig[1].uuid,),
    }


def test_an_old_gpu_serves_mixed_only() -> None:
    placement = place([*prefill(1), *decode(1), GpuWish("mixed-0", Role.MIXED)], MIXED)
    assert indices(placement, MIXED) == {"prefill-0": [0], "decode-0": [1], "mixed-0": [2]}


def test_shares_fill_one_gpu_before_they_open_another() -> None:
    wishes = [share(f"decode-{n}", Role.DECODE, 40, 0.4) for n in range(3)]
    assert indices(place(wishes, A10), A10) == {"decode-0": [0], "decode-1": [0], "decode-2": [1]}


def test_two_phases_can_share_a_single_gpu() -> None:
    wishes = [share("prefill-0", Role.PREFILL, 60, 0.5), share("decode-0", Role.DECODE, 40, 0.5)]
    placement = place(wishes, H200)
    assert indices(placement, H200) == {"prefill-0": [0], "decode-0": [0]}
    assert placement.mixed_because == ""


def test_three_thirds_of_memory_are_one() -> None:
    wishes = [share(f"decode-{n}", Role.DECODE, 33, 1 / 3) for n in range(3)]
    assert indices(place(wishes, H200), H200) == {"decode-0": [0], "decode-1": [0], "decode-2": [0]}


def test_what_is_claimed_is_left_alone() -> None:
    claims = (GpuClaim("nvidia.com/gpu=0", "other"), GpuClaim(A10.gpus[2].uuid, "another", 50, 0.5))
    assert indices(place([*prefill(1), *decode(1)], A10, claims), A10) == {"prefill-0": [1], "decode-0": [3]}


def test_a_claimed_share_leaves_the_rest_of_it() -> None:
    claims = (GpuClaim(H200.gpus[0].uuid, "other", 50, 0.5),)
    assert indices(place([share("decode-0", Role.DECODE, 50, 0.5)], H200, claims), H200) == {"decode-0": [0]}
    assert refusal([share("decode-0", Role.DECODE, 51, 0.5)], H200, claims).startswith("0 GPUs are free")


def test_a_claim_on_a_gpu_of_another_host_changes_nothing() -> None:
    claims = (GpuClaim("GPU-elsewhere", "other"),)
    assert place([*prefill(1), *decode(1)], A10, claims) == place([*prefill(1), *decode(1)], A10)


# --- named GPUs -----------------------------------------------------------------------------------


def test_named_gpus_are_taken_in_their_order_and_the_rest_goes_around_them() -> None:
    wishes = [GpuWish("prefill-0", Role.PREFILL, 2, ("3", "0")), *decode(1)]
    assert indices(place(wishes, A10), A10) == {"prefill-0": [3, 0], "decode-0": [1]}


def test_the_engine_is_asked_by_uuid_and_for_cdi_by_its_name() -> None:
    wishes = [
        GpuWish("prefill-0", Role.PREFILL, 2, ("nvidia.com/gpu=0", "1")),
        GpuWish("decode-0", Role.DECODE, gpus=("nvidia.com/gpu=2",)),
    ]
    assert place(wishes, A10).shards == (
        PlacedShard("prefill-0", Role.PREFILL, ("nvidia.com/gpu=0", A10.gpus[1].uuid), tuple(range(16))),
        PlacedShard("decode-0", Role.DECODE, ("nvidia.com/gpu=2",), tuple(range(16, 32))),
    )


def test_a_slice_can_be_named() -> None:
    named = MIXED.gpus[1].mig[2].uuid
    wishes = [GpuWish("prefill-0", Role.PREFILL, gpus=(named,)), *decode(1)]
    assert place(wishes, MIXED).gpus == {"prefill-0": (named,), "decode-0": (MIXED.gpus[0].uuid,)}


# --- served mixed ---------------------------------------------------------------------------------


def test_a_single_gpu_is_served_mixed_and_says_why() -> None:
    wishes = [*prefill(1, needed_bytes=20 * GIB), *decode(1, needed_bytes=30 * GIB)]
    placement = place(wishes, H200)
    assert placement.shards == (PlacedShard("mixed-0", Role.MIXED, (H200.gpus[0].uuid,), tuple(range(16))),)
    assert placement.mixed_because == (
        "This host has one GPU, GPU 0 (NVIDIA H200), and prefill and decode need one each: served mixed."
    )
    instead = fallback(wishes, H200)
    assert instead is not None
    assert instead.wishes == (GpuWish("mixed-0", Role.MIXED, needed_bytes=30 * GIB),)


def test_a_model_that_needs_every_gpu_is_served_mixed() -> None:
    placement = place([*prefill(1, tp=8), *decode(1, tp=8)], DGX)
    assert indices(placement, DGX) == {"mixed-0": list(range(8))}
    assert placement.mixed_because == "The model needs all 8 GPUs of this host (tp 8): it is served mixed."


def test_old_gpus_are_all_served_mixed_as_far_as_shards_were_asked_for() -> None:
    old = tuple(Gpu(f"GPU-{n}", n, "Tesla T4", 16 * GIB, (7, 5), 40) for n in range(3))
    placement = place([*prefill(1), *decode(1)], Topology(old))
    assert placement.gpus == {"mixed-0": ("GPU-0",), "mixed-1": ("GPU-1",)}
    assert placement.mixed_because.startswith(
        "GPU 0 (Tesla T4) has compute capability 7.5: prefill and decode"
    )
    assert placement.mixed_because.endswith("The model is served mixed.")


def test_one_new_gpu_beside_an_old_one_is_served_mixed_on_the_new_one() -> None:
    gpus = (Gpu("GPU-0", 0, "Tesla T4", 16 * GIB, (7, 5), 40), Gpu("GPU-1", 1, "A10", 24 * GIB, (8, 6), 72))
    placement = place([*prefill(1), *decode(1)], Topology(gpus))
    assert placement.gpus == {"mixed-0": ("GPU-1",)}
    assert placement.mixed_because == (
        "Only GPU 1 (A10) is new enough to separate prefill and decode: the model is served mixed."
    )


def test_a_named_gpu_stays_that_of_the_mixed_shard() -> None:
    placement = place([named("prefill-0", "nvidia.com/gpu=0"), *decode(1)], H200)
    assert placement.gpus == {"mixed-0": ("nvidia.com/gpu=0",)}


@pytest.mark.parametrize(
    "wishes",
    [
        [*prefill(1), *decode(1)],
        [*prefill(1, tp=2), *decode(1, tp=2)],
        [*prefill(1, tp=3), *decode(1)],
        prefill(1, tp=4),
        [*prefill(1, tp=5), *decode(1)],
        [*prefill(1, tp=3), *decode(1, tp=3)],
    ],
    ids=["1+1", "2+2", "3+1", "one phase", "more than all", "two halves too large"],
)
def test_where_separation_is_possible_or_mixed_is_no_way_out_nothing_is_replaced(
    wishes: list[GpuWish],
) -> None:
    assert fallback(wishes, A10) is None


def test_gpus_that_others_have_are_a_reason_to_refuse_and_not_to_serve_mixed() -> None:
    claims = tuple(GpuClaim(str(n), "other") for n in range(3))
    assert refusal([*prefill(1), *decode(1)], A10, claims).endswith("1 prefill can be placed.")


def test_a_mixed_shard_that_was_asked_for_is_kept() -> None:
    wishes = [*prefill(1), *decode(1), GpuWish("mixed-0", Role.MIXED, needed_bytes=5)]
    instead = fallback(wishes, H200)
    assert instead is not None
    assert instead.wishes == (GpuWish("mixed-0", Role.MIXED, needed_bytes=5),)
