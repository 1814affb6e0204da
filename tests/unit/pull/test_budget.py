"""No more bytes than the budget at a time; who came first goes first."""

from __future__ import annotations

import asyncio

from tgi_patches.pull.budget import Budget


async def turns(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_the_third_waits_until_there_is_room_and_a_small_one_does_not_pass_it() -> None:
    budget = Budget(10)
    inside: list[str] = []
    leave = {name: asyncio.Event() for name in "abcd"}

    async def take(name: str, size: int) -> None:
        async with budget.taken(size):
            inside.append(name)
            await leave[name].wait()
            inside.remove(name)

    async with asyncio.TaskGroup() as tasks:
        for name, size in (("a", 4), ("b", 5), ("c", 8), ("d", 1)):
            tasks.create_task(take(name, size))
        await turns()
        assert (inside, budget.free_bytes) == (["a", "b"], 1)
        leave["a"].set()
        await turns()
        assert (inside, budget.free_bytes) == (["b"], 5)
        leave["b"].set()
        await turns()
        assert (inside, budget.free_bytes) == (["c", "d"], 1)
        leave["c"].set()
        leave["d"].set()
    assert budget.free_bytes == 10


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    budget = Budget(10)

    async def take(size: int) -> None:
        async with budget.taken(size):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        first, large = tasks.create_task(take(6)), tasks.create_task(take(9))
        await turns()
        small = tasks.create_task(take(2))
        await turns()
        assert budget.free_bytes == 4
        large.cancel()
        await turns()
        assert budget.free_bytes == 2
        first.cancel()
        small.cancel()
    assert budget.free_bytes == 10


async def test_admitted_and_cancelled_at_once_gives_its_bytes_back() -> None:
    budget = Budget(10)

    async def take(size: int) -> None:
        async with budget.taken(size):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        one, two = tasks.create_task(take(10)), tasks.create_task(take(10))
        await turns()
        one.cancel()
        await turns(1)
        two.cancel()
    assert budget.free_bytes == 10
