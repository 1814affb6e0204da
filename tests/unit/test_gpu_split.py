"""Which GPUs a container has, by every way to ask for them, and how they are split first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.gpu_split import ranks_of, resolved, split
from orchestrator.core.launcher_flags import told
from orchestrator.core.stock import ALL, Gpus

HOST = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd")


@pytest.mark.parametrize(
    ("gpus", "host", "visible", "names"),
    [
        (Gpus(("GPU-bbbb",)), None, None, ("GPU-bbbb",)),
        (Gpus(("GPU-bb",)), HOST, None, ("GPU-bbbb",)),
        (Gpus(("1", "3")), HOST, None, ("GPU-bbbb", "GPU-dddd")),
        (Gpus(("MIG-1234",)), HOST, None, ("MIG-1234",)),
        (Gpus(("nvidia.com/gpu=2",)), HOST, None, ("GPU-cccc",)),
        (Gpus(("nvidia.com/gpu=2",)), None, None, ("nvidia.com/gpu=2",)),
        (Gpus(("nvidia.com/gpu=GPU-aaaa",)), None, None, ("GPU-aaaa",)),
        (Gpus(count=ALL), HOST, None, HOST),
        (Gpus(count=2), HOST, None, HOST[:2]),
        (Gpus(count=ALL), HOST, "2,0", ("GPU-cccc", "GPU-aaaa")),
        (Gpus(("2", "3")), HOST, "1", ("GPU-dddd",)),
        (Gpus(("2", "3")), HOST, "GPU-cccc", ("GPU-cccc",)),
        (Gpus(), HOST, None, ()),
    ],
)
def test_gpus_by_uuid(
    gpus: Gpus, host: tuple[str, ...] | None, visible: str | None, names: tuple[str, ...]
) -> None:
    assert resolved(gpus, host, visible) == (names, "")


@pytest.mark.parametrize(
    ("gpus", "host", "visible", "problem"),
    [
        (Gpus(count=ALL), None, None, "has all GPUs, and NVML cannot be asked"),
        (Gpus(count=3), None, None, "has 3 GPUs, and NVML cannot be asked"),
        (Gpus(("0", "GPU-x")), None, None, "has the GPUs 0, whose UUIDs"),
        (Gpus(("7",)), HOST, None, "has the GPUs 7, whose UUIDs"),
        (Gpus(("GPU-eeee",)), HOST, None, "has the GPUs GPU-eeee, whose UUIDs"),
        (Gpus(("0",)), HOST, "1", "CUDA_VISIBLE_DEVICES names GPUs that it does not have"),
    ],
)
def test_gpus_that_cannot_be_told_are_left_out_with_a_sentence(
    gpus: Gpus, host: tuple[str, ...] | None, visible: str | None, problem: str
) -> None:
    names, said = resolved(gpus, host, visible)
    assert names == ()
    assert problem in said


@pytest.mark.parametrize(
    ("arguments", "gpus", "host", "visible", "ranks"),
    [
        (["--num-shard", "2"], Gpus(count=ALL), HOST, None, 2),
        (["--sharded", "false"], Gpus(count=ALL), HOST, None, 1),
        ([], Gpus(count=ALL), HOST, None, 4),
        ([], Gpus(count=ALL), None, None, 1),
        ([], Gpus(count=2), None, None, 2),
        ([], Gpus(("0", "1", "2")), None, None, 3),
        ([], Gpus(count=ALL), HOST, "0,1", 2),
        ([], Gpus(), HOST, None, 1),
    ],
)
def test_ranks_are_as_many_as_the_launcher_starts(
    arguments: list[str], gpus: Gpus, host: tuple[str, ...] | None, visible: str | None, ranks: int
) -> None:
    assert ranks_of(told(arguments, {}), gpus, host, visible) == ranks


def test_first_splits() -> None:
    two = split(HOST[:2], 1)
    assert (two.prefill, two.decode, two.mixed) == ((("GPU-aaaa",),), (("GPU-bbbb",),), ())
    four = split(HOST, 1)
    assert (len(four.prefill), len(four.decode)) == (1, 3)
    pairs = split(HOST, 2)
    assert (pairs.prefill, pairs.decode) == ((HOST[:2],), (HOST[2:],))
    whole = split(HOST, 4)
    assert (whole.prefill, whole.decode, whole.mixed) == ((), (), (HOST,))
    odd = split(HOST[:3], 2)
    assert (odd.mixed, odd.notes[-1]) == ((HOST[:2],), "Without a shard, since one takes 2: GPU-cccc.")
    assert not split(HOST[:1], 1).placed
    assert "2 GPUs for 4 ranks" in split(HOST[:2], 4).notes[0]


@given(st.integers(0, 12), st.integers(1, 12))
def test_no_gpu_is_given_twice_and_every_shard_has_its_ranks(count: int, tp: int) -> None:
    gpus = [f"GPU-{index}" for index in range(count)]
    found = split(gpus, tp)
    groups = [*found.prefill, *found.decode, *found.mixed]
    used = [gpu for group in groups for gpu in group]
    assert all(len(group) == tp for group in groups)
    assert used == gpus[: len(used)]
    assert bool(groups) is found.placed is (count >= max(2, tp))
    assert bool(found.prefill) is bool(found.decode)
    assert count - len(used) < tp or not found.placed
