"""What is said about named GPUs that cannot be had, and where there is no room."""

from __future__ import annotations

import pytest

from orchestrator.core.placement import GpuClaim, GpuWish
from orchestrator.core.topology import Topology
from tests.unit.placement_cases import (
    A10,
    DGX,
    GIB,
    H200,
    MIXED,
    decode,
    named,
    prefill,
    refusal,
    share,
)
from tgi_patches.contract import Role


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (
            named("prefill-0", "GPU-a1010000-0000-4000-8000-00000000000X"),
            (
                "There is no GPU 'GPU-a1010000-0000-4000-8000-00000000000X'; the nearest one is "
                "'GPU-a1010000-0000-4000-8000-000000000003', GPU 3 (NVIDIA A10)."
            ),
        ),
        (
            named("prefill-0", "1", "nvidia.com/gpu=1", tp=2),
            "GPU 1 (NVIDIA A10) is named twice for prefill-0: each rank needs one of its own.",
        ),
        (named("prefill-0", "1", tp=2), "prefill-0 has 2 ranks (tp), but 1 GPUs are named for it."),
        (
            named("decode-0", "2"),
            (
                "GPU 2 (NVIDIA A10) is named for decode-0 and chat-0 of deployment chat has it: name "
                "another one, or give both a share of it by mps_percent and gpu_memory_fraction."
            ),
        ),
        (
            named("prefill-0", "0", needed_bytes=30 * GIB),
            (
                "prefill-0 needs 30.0 GiB on each GPU and GPU 0 (NVIDIA A10) has 22.5 GiB: raise "
                "shards.prefill.tp, lower limits.max_total_tokens or take a smaller model."
            ),
        ),
        (
            share("decode-0", Role.DECODE, 50, 0.6, "3"),
            (
                "GPU 3 (NVIDIA A10) is shared by decode-0 and night: gpu_memory_fraction adds up to 1.1, "
                "which is over 1."
            ),
        ),
        (
            share("decode-0", Role.DECODE, 60, 0.5, "3"),
            (
                "GPU 3 (NVIDIA A10) is shared by decode-0 and night: mps_percent adds up to 110, "
                "which is over 100."
            ),
        ),
        (
            share("decode-0", Role.DECODE, 10, 0.1, "2"),
            (
                "GPU 2 (NVIDIA A10) is named for decode-0 and chat-0 of deployment chat has it: name "
                "another one, or give both a share of it by mps_percent and gpu_memory_fraction."
            ),
        ),
    ],
)
def test_a_named_gpu_that_cannot_be_had_is_told_in_a_sentence(wish: GpuWish, sentence: str) -> None:
    claims = (GpuClaim("2", "chat-0 of deployment chat"), GpuClaim("3", "night", 50, 0.5))
    assert refusal([wish], A10, claims) == sentence


def test_a_gpu_named_for_two_shards_is_told() -> None:
    assert refusal([named("prefill-0", "0"), named("decode-0", A10.gpus[0].uuid)], A10) == (
        "GPU 0 (NVIDIA A10) is named for decode-0 and prefill-0 has it: name another one, or give both a "
        "share of it by mps_percent and gpu_memory_fraction."
    )


def test_a_single_gpu_named_for_both_phases_is_a_mistake_and_not_served_mixed() -> None:
    assert "is named for decode-0 and prefill-0 has it" in refusal(
        [named("prefill-0", "0"), named("decode-0", "0")], H200
    )


def test_a_split_gpu_cannot_be_named_whole_and_slices_form_no_group() -> None:
    split = MIXED.gpus[1]
    assert refusal([named("decode-0", "1")], MIXED) == (
        "GPU 1 (NVIDIA A100-PCIE-40GB) is split and cannot be had whole: name one of its slices "
        f"({', '.join(part.uuid for part in split.mig)})."
    )
    assert refusal([named("decode-0", "1:0", "1:1", tp=2)], MIXED) == (
        f"decode-0 has 2 ranks (tp), and slice {split.mig[0].uuid} (3g.20gb) of GPU 1 (NVIDIA "
        f"A100-PCIE-40GB) "
        "cannot be one of them: MIG slices do not reach each other, so name whole GPUs or set tp to 1."
    )


def test_an_old_gpu_named_for_a_phase_is_told() -> None:
    assert refusal([named("prefill-0", "2"), *decode(1)], MIXED) == (
        "GPU 2 (Tesla T4) has compute capability 7.5: prefill and decode cannot be separated on it, "
        "because flash attention over a cached prefix needs 8.0 (Ampere) or newer. Name another GPU for "
        "prefill-0, or serve with shards.mixed."
    )


# --- no room --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "topology", "claims", "sentence"),
    [
        (
            [*prefill(1, tp=2), *decode(2)],
            A10,
            (GpuClaim("2", "chat-0 of deployment chat"),),
            (
                "3 GPUs are free and 4 are wanted; GPU 2 (NVIDIA A10) is taken by chat-0 of deployment "
                "chat: 1 prefill with tp 2 and 1 decode can be placed."
            ),
        ),
        (
            [*prefill(1, tp=2), *decode(3)],
            A10,
            (GpuClaim("0", "night"),),
            (
                "3 GPUs are free and 5 are wanted; GPU 0 (NVIDIA A10) is taken by night: 1 prefill with tp 2 "
                "and 1 decode can be placed."
            ),
        ),
        (
            [*prefill(2, tp=4), *decode(1)],
            DGX,
            (),
            "8 GPUs are free and 9 are wanted: 1 prefill with tp 4 and 1 decode can be placed.",
        ),
        (
            [*prefill(1), *decode(4)],
            MIXED,
            (),
            (
                "1 GPU and 3 MIG slices are free and 5 are wanted; GPU 2 (Tesla T4) is too old for "
                "prefill and decode: 1 prefill and 3 decode can be placed."
            ),
        ),
        (
            [*prefill(1, tp=2), *decode(1)],
            MIXED,
            (),
            (
                "1 GPU and 3 MIG slices are free and 3 are wanted; GPU 2 (Tesla T4) is too old for "
                "prefill and decode; MIG slices cannot be the ranks of one shard: 1 decode can be placed."
            ),
        ),
        (
            [*prefill(1), *decode(2, needed_bytes=15 * GIB)],
            MIXED,
            (GpuClaim(MIXED.gpus[0].uuid, "other"),),
            (
                "3 MIG slices are free and 3 are wanted; GPU 0 (NVIDIA A100-PCIE-40GB) is taken by "
                "other; GPU 2 (Tesla T4) is too old for prefill and decode: 1 prefill and 1 decode can "
                "be placed."
            ),
        ),
        (
            [share(f"decode-{n}", Role.DECODE, 60, 0.5) for n in range(5)],
            A10,
            (),
            "4 GPUs are free and 5 shares are wanted: 4 decode of 60 % can be placed.",
        ),
        (
            [*prefill(1), *decode(1)],
            A10,
            (GpuClaim("all", "exporter"),),
            (
                "0 GPUs are free and 2 are wanted; GPUs 0, 1, 2 and 3 are taken by exporter: nothing of "
                "it can be placed."
            ),
        ),
        (
            [*decode(2, tp=2)],
            MIXED,
            (),
            (
                "1 GPU is free and 4 are wanted; GPU 2 (Tesla T4) is too old for prefill and decode; MIG "
                "slices cannot be the ranks of one shard: nothing of it can be placed."
            ),
        ),
        (
            [GpuWish(f"mixed-{n}", Role.MIXED, needed_bytes=18 * GIB) for n in range(3)],
            MIXED,
            (),
            (
                "1 GPU and 1 MIG slice are free and 3 are wanted; GPUs 2, "
                "MIG-31000000-0000-5000-8000-00000000000b and MIG-31000000-0000-5000-8000-00000000000c are "
                "too small: 2 mixed can be placed."
            ),
        ),
        ([*prefill(1), *decode(1)], Topology(()), (), "This host has no GPU, and 2 are wanted."),
        (
            [*prefill(1, needed_bytes=30 * GIB), *decode(1)],
            A10,
            (),
            (
                "prefill-0 needs 30.0 GiB on each GPU and the largest here, GPU 0 (NVIDIA A10), has 22.5 "
                "GiB: raise shards.prefill.tp, lower limits.max_total_tokens or take a smaller model."
            ),
        ),
        (
            [*prefill(1, tp=2), *decode(1)],
            H200,
            (),
            "1 GPU is free and 3 are wanted: 1 decode can be placed.",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_nearest_that_can(
    wishes: list[GpuWish], topology: Topology, claims: tuple[GpuClaim, ...], sentence: str
) -> None:
    assert refusal(wishes, topology, claims) == sentence
