"""The bridge's benchmark measures what it says, on records small enough for a test."""

from __future__ import annotations

import gc

import torch

from orchestrator.bench.bridge import measure

TOKEN_BYTES = 46_080
"""SmolLM2-135M in fp32: 2 x 30 layers x 3 heads x 64 x 4 bytes."""


def test_each_size_is_measured_with_consecutive_and_with_scattered_slots() -> None:
    threads = torch.get_num_threads()
    rows = measure([20 * TOKEN_BYTES + 7, 40 * TOKEN_BYTES], rounds=2)
    shapes = [(row["kv_bytes"], row["tokens"], row["consecutive"]) for row in rows]
    assert shapes == [
        (20 * TOKEN_BYTES, 20, True),
        (20 * TOKEN_BYTES, 20, False),
        (40 * TOKEN_BYTES, 40, True),
        (40 * TOKEN_BYTES, 40, False),
    ]
    for row in rows:
        assert all(isinstance(value, bool | int) or value > 0.0 for value in row.values())  # type: ignore[operator]
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, True)
