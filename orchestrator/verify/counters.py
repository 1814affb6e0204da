"""What the shards themselves counted: the second witness that records were imported."""

from __future__ import annotations

from collections import Counter

import httpx

from orchestrator.errors import Unreachable
from orchestrator.verify.answer import IMPORT_HIT
from orchestrator.verify.asking import NotTgi, get_json

TIMEOUT_S = 5.0


async def import_counts(gateway: httpx.AsyncClient) -> Counter[str] | None:
    """Imports by result over all shards of the deployment; None where a shard is out of our reach."""
    status = await get_json(gateway, "/admin/status")
    total: Counter[str] = Counter()
    for shard in status["shards"]:
        async with httpx.AsyncClient(base_url=shard["url"], timeout=TIMEOUT_S, trust_env=False) as client:
            try:
                told = await get_json(client, "/kv/status")
            except (Unreachable, NotTgi):
                return None
        total.update(told["imports"])
    return total


def problems_in(counted: Counter[str] | None, hits: int) -> list[str]:
    """Where the shards contradict the gateway, which says that `hits` requests were served by a record."""
    if counted is None:
        return []
    found = []
    seen = counted[IMPORT_HIT]
    if seen < hits:
        found.append(f"The gateway reports {hits} imported records, the shards counted {seen}.")
    misses = {result: count for result, count in counted.items() if result != IMPORT_HIT and count}
    if misses:
        listed = ", ".join(f"{count} x {result}" for result, count in sorted(misses.items()))
        found.append(f"The shards counted local prefills in place of an import: {listed}.")
    return found
