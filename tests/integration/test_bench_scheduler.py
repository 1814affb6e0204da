"""The parts of `bench scheduler` that measure processes, on a real Redis and made short."""

from __future__ import annotations

from orchestrator.bench.scheduler import client_cost, conductor_cost


async def test_the_queue_part_prices_every_way_and_times_grants() -> None:
    part = await client_cost.measure(client_cost.Plan(rounds=1, requests=32, latencies=5))
    assert len(part.rows) == 7
    assert all(float(row["us, least"] or 0) > 0 for row in part.rows)
    by_hand = [row for row in part.rows if row["way"] == "redis-py"]
    assert [row["at once"] for row in by_hand] == [1, 16]
    assert by_hand[0]["ratio"] == 1.0
    assert all(verdict.value for verdict in part.verdicts)


async def test_the_conductor_part_decides_tickets_while_the_queue_stands() -> None:
    plan = conductor_cost.Plan(
        prefill=2, decode=2, standing=600, warm_up=50, speed_s=1.0, memory_s=1.5, sample_every_s=0.5
    )
    part = await conductor_cost.measure(plan)
    (row,) = part.rows
    assert float(row["tickets"] or 0) > 0
    assert float(row["standing, least"] or 0) >= 600
    assert len(part.conditions["memory_samples"]) >= 2
    assert all(verdict.value for verdict in part.verdicts)
