"""Ranks that are gone with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.sidecar.ranks import Rank, spec_in
from tgi_patches.contract import ShardSpec

Ranks = Callable[..., list[Rank]]


@pytest.fixture
def spec(tmp_path: Path) -> ShardSpec:
    """Of two ranks."""
    return spec_in(tmp_path / "arenas", ranks=2)


@pytest.fixture
def start() -> Iterator[Ranks]:
    opened: list[Rank] = []

    def make(spec: ShardSpec) -> list[Rank]:
        opened.extend(Rank(spec, rank) for rank in range(spec.tensor_parallel))
        return opened

    yield make
    for rank in opened:
        rank.close()
