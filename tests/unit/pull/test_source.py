"""A server offers one incarnation of one shard, and each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bridge.conftest import FINGERPRINT, FIRST, handle, pattern, reason_of, runs_of
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import MissReason
from tgi_patches.pull.source import ArenaSource


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[list[ArenaBridge]]:
    """Two ranks at epoch 8, each with a record of its own."""
    bridges = [ArenaBridge(tmp_path / "a", "d", "p", rank, 8, FINGERPRINT, 65536, 60.0) for rank in (0, 1)]
    for rank, bridge in enumerate(bridges):
        bridge.export(handle(1), range(4), FIRST, False, runs_of(pattern(rank, 2, 400)))
    yield bridges
    for bridge in bridges:
        bridge.close()


def test_each_rank_s_record_is_offered_where_it_lies(tmp_path: Path, shard: list[ArenaBridge]) -> None:
    source = ArenaSource(tmp_path / "a", "d", "p", 8, FINGERPRINT, ranks=2)
    for rank, bridge in enumerate(shard):
        offer = source.find(8, handle(1), rank)
        offer.check()
        assert (offer.record.rank, offer.record.checksums) == (rank, bridge.own_lookup(handle(1)).checksums)
        assert (bytes(offer.data), offer.data.readonly) == (b"".join(pattern(rank, 2, 400)), True)
        bridge.export(handle(1), range(4), FIRST, False, runs_of(pattern(9, 2, 400)))
        assert reason_of(offer.check) == MissReason.OVERWRITTEN
    source.close()
    assert bytes(source.find(8, handle(1), 0).data) == b"".join(pattern(9, 2, 400))
    source.close()


def test_another_incarnation_or_rank_is_not_offered(tmp_path: Path, shard: list[ArenaBridge]) -> None:
    source = ArenaSource(tmp_path / "a", "d", "p", 8, FINGERPRINT, ranks=1)
    assert reason_of(source.find, 7, handle(1), 0) == MissReason.EPOCH
    assert reason_of(source.find, 8, handle(1), 1) == MissReason.RANKS
    former = ArenaSource(tmp_path / "a", "d", "p", 7, FINGERPRINT)
    for epoch in (7, 8):
        assert reason_of(former.find, epoch, handle(1), 0) == MissReason.EPOCH
    for opened in (source, former):
        opened.close()
