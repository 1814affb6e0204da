"""Mail of several ranks: a waiter is woken by the last one, failed by any one, and never polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.unit.sidecar.ranks import HANDLE, OTHER, Rank, fingerprint
from tgi_patches.bridge import Record
from tgi_patches.contract import PROTOCOL_VERSION, MissReason, ShardSpec, WaitReply
from tgi_patches.sidecar import Sidecar
from tgi_patches.sidecar.mail import EveryRank, listening
from tgi_patches.sidecar.records import Records

LONG_S = 30.0
FOUND = WaitReply(
    PROTOCOL_VERSION, HANDLE, found=True, first_token_id=42, ended=False, kv_bytes=192, prompt_tokens=3
)
Start = Callable[..., list[Rank]]


class CountedRecords(Records):
    looks = 0

    def own_lookup(self, handle: str) -> Record:
        self.looks += 1
        return super().own_lookup(handle)


class Beside:
    """A sidecar that listens, as its process puts it together."""

    def __init__(self, spec: ShardSpec, stack: ExitStack) -> None:
        self.records = stack.enter_context(closing(CountedRecords(spec, 77, lambda: fingerprint(2))))
        self.sidecar = Sidecar(lambda: pytest.fail("nobody asks for the status"), self.records, keep_s=60.0)
        stack.enter_context(listening(spec, self.sidecar, self.records))

    async def waiting(self, handle: str = HANDLE) -> asyncio.Task[WaitReply]:
        task = asyncio.create_task(self.sidecar.wait(handle, LONG_S))
        await asyncio.sleep(0)
        assert not task.done()
        return task


@pytest.fixture
async def stack() -> AsyncIterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


async def delivered() -> None:
    """All letters that were posted have been read: the loop has looked at its pipes."""
    for _ in range(20):
        await asyncio.sleep(0)


async def within(answer: asyncio.Task[WaitReply]) -> WaitReply:
    return await asyncio.wait_for(answer, 10.0)


async def test_the_last_rank_s_letter_wakes_a_waiter(spec: ShardSpec, start: Start, stack: ExitStack) -> None:
    zero, one = start(spec)
    beside = Beside(spec, stack)
    task = await beside.waiting()
    one.export()
    one.post()
    await delivered()
    assert not task.done()
    zero.export()
    zero.post()
    assert await within(task) == FOUND


async def test_a_waiter_looks_when_something_happens_and_at_no_other_time(
    spec: ShardSpec, start: Start, stack: ExitStack
) -> None:
    """Once when it comes, once for each of two letters, once when it is woken."""
    zero, one = start(spec)
    beside = Beside(spec, stack)
    task = await beside.waiting()
    for rank in (zero, one):
        rank.export()
    await asyncio.sleep(0.1)
    assert beside.records.looks == 1
    zero.post()
    one.post()
    await within(task)
    assert beside.records.looks <= 4


async def test_a_failure_of_any_rank_fails_it_at_once(
    spec: ShardSpec, start: Start, stack: ExitStack
) -> None:
    zero, one = start(spec)
    beside = Beside(spec, stack)
    task = await beside.waiting()
    zero.export()
    zero.post()
    one.mail.failed(HANDLE, MissReason.LAYOUT)
    reply = await within(task)
    assert (reply.found, reply.reason) == (False, MissReason.LAYOUT)
    later = await beside.sidecar.wait(HANDLE, LONG_S)
    assert later == reply


async def test_a_letter_that_came_before_the_sidecar_is_not_needed(
    spec: ShardSpec, start: Start, stack: ExitStack
) -> None:
    """Rank 0 told a sidecar that is gone."""
    zero, one = start(spec)
    zero.export()
    zero.post()
    beside = Beside(spec, stack)
    task = await beside.waiting()
    one.export()
    one.post()
    assert await within(task) == FOUND


async def test_what_is_there_already_is_answered_without_any_letter(
    spec: ShardSpec, start: Start, stack: ExitStack
) -> None:
    for rank in start(spec):
        rank.export()
    assert await Beside(spec, stack).sidecar.wait(HANDLE, 0.0) == FOUND


async def test_one_request_s_letters_do_not_wake_another(
    spec: ShardSpec, start: Start, stack: ExitStack
) -> None:
    ranks = start(spec)
    beside = Beside(spec, stack)
    mine, other = await beside.waiting(), await beside.waiting(OTHER)
    for rank in ranks:
        rank.export()
        rank.post()
    assert await within(mine) == FOUND
    assert not other.done()
    other.cancel()


def test_a_single_rank_s_letter_is_taken_at_its_word() -> None:
    """A record that was overwritten meanwhile is answered at once, as a miss."""
    woken: list[str] = []

    class Woken(Sidecar):
        def published(self, handle: str) -> None:
            woken.append(handle)

    class Nothing:
        def own_lookup(self, handle: str) -> Record:
            raise AssertionError("one rank needs no look")

    EveryRank(Woken(lambda: pytest.fail("no status"), Nothing(), 60.0), Nothing(), 1).published(HANDLE)
    assert woken == [HANDLE]


async def test_a_mailbox_that_cannot_be_opened_closes_the_others(spec: ShardSpec, start: Start) -> None:
    start(spec)
    folder = Path(spec.arena_dir) / spec.deployment
    (folder / "p0.1.mailbox").write_text("not a FIFO")
    sidecar = Sidecar(lambda: pytest.fail("no status"), Records(spec, 77, lambda: None), 60.0)
    with pytest.raises(FileExistsError), listening(spec, sidecar, Records(spec, 77, lambda: None)):
        pytest.fail("it must not begin")
    (folder / "p0.1.mailbox").unlink()
    with listening(spec, sidecar, Records(spec, 77, lambda: None)):
        assert (folder / "p0.1.mailbox").is_fifo()
