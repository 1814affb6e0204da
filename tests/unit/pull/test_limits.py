"""Limits that could never work are refused when they are made."""

from __future__ import annotations

import pytest

from tgi_patches.pull import PullLimits

KIB, MIB = 1024, 2**20


def test_chunks_are_what_a_server_accepts() -> None:
    assert PullLimits(chunk_bytes=256 * KIB).chunk_bytes == 262_144
    assert PullLimits(chunk_bytes=64 * MIB).chunk_bytes == 67_108_864
    for chunk_bytes in (0, 256 * KIB - 1, 64 * MIB + 1):
        with pytest.raises(ValueError, match="chunk_bytes must be"):
            PullLimits(chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("limits", [{"pulls_at_once": 0}, {"connect_s": 0.0}, {"step_s": -1.0}])
def test_nothing_takes_no_time_or_happens_zero_times(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        PullLimits(**limits)  # type: ignore[arg-type]
