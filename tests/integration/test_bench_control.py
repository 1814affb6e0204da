"""`bench control` in small."""

from __future__ import annotations

from orchestrator.bench.control import measure


async def test_a_conductor_that_keeps_shards_is_measured_beside_its_redis() -> None:
    told = (await measure(8, 0.5)).to_dict()
    assert told["shards"] == 8
    assert told["seconds"] >= 0.5
    assert told["conductor_core_percent"] > 0
    assert told["redis_core_percent"] > 0
