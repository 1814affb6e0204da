"""Slots of a paged pool as runs of bytes, without a copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.kv.in_place import planes
from tgi_patches.kv.slots import runs


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([7], [(7, 1)]),
        ([3, 4, 5], [(3, 3)]),
        ([3, 4, 9, 10, 11, 0], [(3, 2), (9, 3), (0, 1)]),
        ([5, 4, 3], [(5, 1), (4, 1), (3, 1)]),
        ([2, 2], [(2, 1), (2, 1)]),
        ([3, 9, 5], [(3, 1), (9, 1), (5, 1)]),
    ],
)
def test_consecutive_slots_become_one_run(slots: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(slots) == expected


@given(st.lists(st.integers(0, 12), max_size=40))
def test_runs_name_the_same_slots_in_the_same_order(slots: list[int]) -> None:
    found = runs(slots)
    assert [slot for start, length in found for slot in range(start, start + length)] == slots
    assert all(a + n != b for (a, n), (b, _) in pairwise(found))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_planes_are_the_bytes_of_the_slots(dtype: torch.dtype) -> None:
    """Layer by layer, K before V; expected bytes are gathered with torch's own indexing."""
    torch.manual_seed(1)
    pools = [(torch.randn(4, 8, 3, 16).to(dtype), torch.randn(4, 8, 3, 16).to(dtype)) for _layer in range(2)]
    slots = [17, 18, 19, 2, 31]

    found = planes(pools, runs(slots))

    assert [len(plane) for plane in found] == [3] * 4
    for plane, pool in zip(found, [pool for pair in pools for pool in pair], strict=True):
        rows = pool.view(torch.uint8).reshape(32, -1)[slots]
        assert b"".join(plane) == bytes(rows.numpy())


def test_writing_a_run_writes_the_pool_and_nothing_else() -> None:
    key, value = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    (k_run, _), (v_run, _) = planes([(key, value)], [(3, 2), (0, 1)])
    k_run[:] = torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes()
    assert key.reshape(8, 2).tolist() == [[0, 0]] * 3 + [[1, 2], [3, 4]] + [[0, 0]] * 3
    assert value.abs().sum() == 0
    v_run[:] = k_run
    assert value.reshape(8, 2)[3:5].tolist() == [[1, 2], [3, 4]]


def test_pools_of_different_rows_are_cut_each_by_its_own() -> None:
    key = torch.arange(48, dtype=torch.int8).view(2, 4, 2, 3)
    value = torch.arange(16, dtype=torch.float32).view(2, 4, 1, 2)
    (k_runs, v_runs) = planes([(key, value)], [(6, 1), (1, 2)])
    assert [bytes(run) for run in k_runs] == [bytes(range(36, 42)), bytes(range(6, 18))]
    assert [run.cast("f").tolist() for run in v_runs] == [[12, 13], [2, 3, 4, 5]]


def test_pools_made_for_inference_are_shared_too() -> None:
    with torch.inference_mode():
        key, value = torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 2)
        ((run,), _) = planes([(key, value)], [(1, 1)])
        run[:] = bytes(8)
        assert key.reshape(-1).tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("run", [(7, 2), (-1, 2), (8, 1)])
def test_slots_outside_the_pool_are_refused(run: tuple[int, int]) -> None:
    pool = torch.zeros(2, 4, 1, 2)
    with pytest.raises(IndexError, match="outside a pool of 8"):
        planes([(pool, pool)], [run])


@pytest.mark.parametrize("pool", [torch.zeros(2, 4, 6, 2).transpose(1, 2), torch.zeros(8, 3, 16)])
def test_another_layout_is_refused(pool: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        planes([(pool, pool)], [(0, 1)])
