"""SIGKILL in mid-load, to the leading conductor and to a gateway: processes, a real Redis, fake shards."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tgi_patches.contract import GetTag, PutTag

from .site import KEYS, LONG, SLOTS, TOKENS, Site, outcomes, site, until

PER_GATEWAY = 200
TOGETHER = 24
"""For each gateway; both together ask for three times what the decode shard has."""


async def gauges_are_back(made: Site, gateways: list[int]) -> None:
    """Redis and every gateway say that nothing is held."""
    await until(made.clean, "an empty Redis")
    for gateway in gateways:
        told = await made.status(gateway)
        assert told["reserved"] == {"kv_tokens": 0, "slots": 0}
        assert told["outstanding"] == {"records": 0, "bytes": 0}
        assert (told["waiting"], told["open_requests"]) == (0, 0)


async def test_a_leader_that_is_killed_in_mid_load_costs_no_request_and_is_replaced(tmp_path: Path) -> None:
    async with site(tmp_path) as (made, _):
        before = await made.leader()
        first = next(pid for pid in made.conductors if before.startswith(f"conductor-{pid}."))
        (second,) = made.conductors.keys() - {first}
        loads = [asyncio.create_task(made.load(n, PER_GATEWAY, TOGETHER)) for n in range(2)]
        await until(lambda: len(made.ended) > PER_GATEWAY // 2, "a part of the load")
        os.kill(first, signal.SIGKILL)
        # The dead one's lock ends by itself: this is how long nobody leads at most.
        assert 0 < await made.redis.pttl(KEYS.leader) <= 2500

        async def replaced() -> bool:
            return (await made.leader()).startswith(f"conductor-{second}.")

        await until(replaced, "the standby's turn")
        assert int((await made.leader()).rpartition(":")[2]) == int(before.rpartition(":")[2]) + 1
        ended = [one for load in loads for one in await load]
        assert outcomes(ended) == {("done", TOKENS, ""): 2 * PER_GATEWAY}
        assert made.most_legs(PutTag) == made.most_legs(GetTag) == 1
        await gauges_are_back(made, [0, 1])
        assert [(await made.ask(n)).kind for n in range(2)] == ["done", "done"]


async def test_a_gateway_that_is_killed_in_mid_stream_breaks_its_own_clients_only(tmp_path: Path) -> None:
    async with site(tmp_path) as (made, _):
        decode = made.shards[1]
        held = [asyncio.create_task(made.ask(0, LONG)) for _ in range(SLOTS // 2)]
        await until(lambda: decode.holding == SLOTS // 2, "streams under way")
        dying, living = [asyncio.create_task(made.load(n, PER_GATEWAY, TOGETHER)) for n in range(2)]
        await until(lambda: len(made.ended) > PER_GATEWAY // 2, "a part of the load")
        made.gateways[0].send_signal(signal.SIGKILL)
        broken = await asyncio.gather(*held)
        assert {(one.kind, one.tokens) for one in broken} == {("broken", 5)}
        assert {one.kind for one in await dying} <= {"done", "broken"}
        assert outcomes(await living) == {("done", TOKENS, ""): PER_GATEWAY}
        assert made.most_legs(PutTag) == made.most_legs(GetTag) == 1
        await gauges_are_back(made, [1])
        await until(lambda: decode.holding == 0, "the end of what the dead one had asked for")
        # Every slot is there again.
        whole = [asyncio.create_task(made.ask(1, LONG)) for _ in range(SLOTS)]
        await until(lambda: decode.holding == SLOTS, "a full shard")
        decode.let_go.set()
        assert outcomes(await asyncio.gather(*whole)) == {("done", LONG, ""): SLOTS}
        await gauges_are_back(made, [1])
