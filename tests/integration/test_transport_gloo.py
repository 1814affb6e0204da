"""Records between two real processes over gloo, this test in the place of both sidecars.

Each end is an event loop with a FIFO to hear and one to answer; ends are killed, or never start.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration import transport_end
from tests.integration.transport_end import content
from tgi_patches.transport.lines import LineReader, LineWriter
from tgi_patches.transport.state import LinkLimits

ROWS = (256, 256, 64, 64)
LARGE_TOKENS = 64_000
"""About 40 MB: not gone in a moment."""
PATIENCE_S = 30.0
UNHURRIED = LinkLimits(connect_s=PATIENCE_S, offer_s=PATIENCE_S, move_s=PATIENCE_S, rest_s=0.05)
"""No deadline of these passes, however busy the machine is."""


@pytest.fixture(scope="module")
def fork() -> Any:
    """Processes are forked from one that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([transport_end.__name__])
    return context


class End:
    """One end's process, as its sidecar sees it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.process: Any = None
        self.on_line: Callable[[str], None] = lambda line: None
        self._arrived = asyncio.Event()
        self._commands = LineWriter(folder / f"{name}.commands")
        self._answers = LineReader(folder / f"{name}.answers", self._heard)
        self._answers.open()

    def _heard(self, line: str) -> None:
        self.lines.append(line)
        self.on_line(line)
        self._arrived.set()

    async def says(self, start: str) -> str:
        """The first line that begins so and was not asked for before; it is taken away."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.lines:
                    if line.startswith(start):
                        self.lines.remove(line)
                        return line[len(start) :].strip()
                self._arrived.clear()
                await self._arrived.wait()

    def tell(self, line: str) -> None:
        assert self._commands.write(line)

    async def start(self, fork: Any, folder: Path, rows: tuple[int, ...], limits: LinkLimits) -> None:
        self.process = fork.Process(target=transport_end.main, args=(str(folder), self.name, rows, limits))
        self.process.start()
        await self.says("up")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(PATIENCE_S)
            self.process = None

    def close(self) -> None:
        self.kill()
        self._answers.close()
        self._commands.close()


class Pair:
    """A giver `p` and a taker `d`; lines of one are passed on to the other as sidecars do."""

    def __init__(self, folder: Path, fork: Any, limits: LinkLimits) -> None:
        self.folder = folder
        self.fork = fork
        self.limits = limits
        self.before_answer: Callable[[], None] = lambda: None
        self.p, self.d = End(folder, "p"), End(folder, "d")
        self.p.on_line = lambda line: self._pass_on(line, self.p, self.d)
        self.d.on_line = lambda line: self._pass_on(line, self.d, self.p)

    def _pass_on(self, line: str, source: End, target: End) -> None:
        word, _, rest = line.partition(" ")
        _, _, text = rest.partition(" ")
        if word == "answer":
            self.before_answer()
        renamed = {"invited": "join", "offer": "offer", "answer": "answer"}.get(word)
        if renamed is not None and target.process is not None:
            target.tell(f"{renamed} {source.name} {text}".rstrip())

    async def start_again(self, end: End) -> None:
        await end.start(self.fork, self.folder, ROWS, self.limits)

    async def connect(self) -> None:
        self.p.tell("invite d")
        await self.p.says("invited d")

    def give(self, number: int, tokens: int) -> None:
        self.p.tell(f"give d {number} {tokens}")

    async def arrived(self, number: int, tokens: int) -> str:
        """What `d` has of it: the hash of its bytes, or why it has nothing."""
        self.d.tell(f"show {number} {tokens}")
        return await self.d.says(f"shown {number}")

    async def given(self, number: int) -> str:
        return await self.p.says(f"given {number} ")


def hash_of(number: int, tokens: int, rows: tuple[int, ...] = ROWS) -> str:
    return hashlib.blake2b(content(number, tokens * sum(rows)), digest_size=16).hexdigest()


@asynccontextmanager
async def started(
    tmp_path: Path,
    fork: Any,
    *,
    taker: bool = True,
    taker_rows: tuple[int, ...] = ROWS,
    limits: LinkLimits = UNHURRIED,
) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path, fork, limits)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(pair.p.start(fork, tmp_path, ROWS, limits))
            if taker:
                group.create_task(pair.d.start(fork, tmp_path, taker_rows, limits))
        yield pair
    finally:
        pair.p.close()
        pair.d.close()


async def test_records_arrive_whole_one_after_another_even_when_given_at_once(
    tmp_path: Path, fork: Any
) -> None:
    async with started(tmp_path, fork) as pair:
        await pair.connect()
        for number, tokens in ((1, 1), (2, 5000), (3, 7)):
            pair.give(number, tokens)
        for number, tokens in ((1, 1), (2, 5000), (3, 7)):
            assert await pair.given(number) == "ok"
            await pair.d.says(f"moved p {number:032x}")
            assert await pair.arrived(number, tokens) == hash_of(number, tokens)
        assert await pair.arrived(4, 7) == "missing"
        assert await pair.arrived(3, 6) == "tokens_differ"


WRONG = {"other": "what came was not what was offered: layout", "longer": "64128 bytes are coming, not 32064"}


@pytest.mark.parametrize("how", ["other", "longer"])
async def test_what_is_not_what_was_offered_is_not_kept_and_the_link_comes_back(
    tmp_path: Path, fork: Any, how: str
) -> None:
    async with started(tmp_path, fork) as pair:
        await pair.connect()
        pair.p.tell(f"{how} d 1 50")
        assert await pair.d.says("lost p") == WRONG[how]
        assert await pair.arrived(1, 50) == "missing"
        await assert_serves(pair, 2)


async def test_a_record_of_another_shape_is_refused_before_it_moves(tmp_path: Path, fork: Any) -> None:
    async with started(tmp_path, fork, taker_rows=(256, 256, 64, 32)) as pair:
        await pair.connect()
        pair.give(1, 50)
        assert await pair.given(1) == "layout"
        pair.give(2, 50)
        assert await pair.given(2) == "layout"  # the link is as it was
        assert await pair.arrived(1, 50) == "missing"


async def test_a_taker_that_is_killed_in_the_middle_costs_a_link_and_a_new_one_serves(
    tmp_path: Path, fork: Any
) -> None:
    """It has accepted and waits for 40 MB when it dies; the giver begins to send afterwards."""
    async with started(tmp_path, fork) as pair:
        await pair.connect()
        pair.before_answer = pair.d.kill
        pair.give(1, LARGE_TOKENS)
        pair.give(2, 5)
        assert await pair.given(1) == "link"
        assert await pair.given(2) == "link"
        pair.before_answer = lambda: None
        await pair.start_again(pair.d)
        await assert_serves(pair, 3)


async def test_a_giver_that_is_killed_in_the_middle_leaves_nothing_behind(tmp_path: Path, fork: Any) -> None:
    async with started(tmp_path, fork) as pair:
        await pair.connect()
        pair.before_answer = pair.p.kill
        pair.give(1, LARGE_TOKENS)
        await pair.d.says("lost p")
        assert await pair.arrived(1, LARGE_TOKENS) == "missing"
        pair.before_answer = lambda: None
        await pair.start_again(pair.p)
        await assert_serves(pair, 2)


async def test_a_taker_that_hangs_in_the_middle_is_given_up_at_the_deadline(
    tmp_path: Path, fork: Any
) -> None:
    async with started(tmp_path, fork, limits=replace(UNHURRIED, move_s=0.5)) as pair:
        await pair.connect()
        stopped = pair.d.process.pid
        pair.before_answer = lambda: os.kill(stopped, signal.SIGSTOP)
        pair.give(1, LARGE_TOKENS)
        assert await pair.given(1) == "link"
        assert await pair.p.says("lost d") == "moving took too long"
        os.kill(stopped, signal.SIGCONT)
        pair.before_answer = lambda: None
        await pair.d.says("lost p")  # its own deadline, or the end of the connection
        assert await pair.arrived(1, LARGE_TOKENS) == "missing"


async def test_a_peer_that_never_comes_is_given_up_and_may_come_later(tmp_path: Path, fork: Any) -> None:
    async with started(tmp_path, fork, taker=False, limits=replace(UNHURRIED, connect_s=1.5)) as pair:
        await pair.connect()
        pair.give(1, 5)
        assert await pair.given(1) == "link"
        assert await pair.p.says("lost d") == "connecting took too long"
        pair.give(2, 5)
        assert await pair.given(2) == "link"  # at once: there is no link
        pair.limits = UNHURRIED
        await pair.start_again(pair.d)
        await assert_serves(pair, 3)


async def test_both_directions_at_once_do_not_get_in_each_others_way(tmp_path: Path, fork: Any) -> None:
    async with started(tmp_path, fork) as pair:
        await pair.connect()
        pair.d.tell("invite p")
        await pair.d.says("invited p")
        pair.give(1, 3000)
        pair.d.tell("give p 2 3000")
        assert await pair.given(1) == "ok"
        assert await pair.d.says("given 2 ") == "ok"
        await pair.d.says("moved p")
        await pair.p.says("moved d")
        assert await pair.arrived(1, 3000) == hash_of(1, 3000)
        pair.p.tell("show 2 3000")
        assert await pair.p.says("shown 2") == hash_of(2, 3000)


async def assert_serves(pair: Pair, number: int) -> None:
    """The two connect anew, and a record arrives."""
    await again(pair)
    pair.give(number, 5)
    assert await pair.given(number) == "ok"
    await pair.d.says(f"moved p {number:032x}")
    assert await pair.arrived(number, 5) == hash_of(number, 5)


async def again(pair: Pair) -> None:
    """As sidecars do: an end may rest, or hold on to the former life of its peer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for end in (pair.p, pair.d):
                end.lines = [line for line in end.lines if not line.startswith(("lost", "invited"))]
            pair.p.tell("invite d")
            if await _either(pair.p, "invited d", "lost d") == "invited d" and await _joined(pair):
                return
            await asyncio.sleep(0.02)


async def _joined(pair: Pair) -> bool:
    """The taker answers a join only where it cannot follow it."""
    pair.d.tell("show 999 1")
    await pair.d.says("shown 999")
    return not any(line.startswith("lost p") for line in pair.d.lines)


async def _either(end: End, *starts: str) -> str:
    while True:
        for start in starts:
            if any(line.startswith(start) for line in end.lines):
                await end.says(start)
                return start
        await asyncio.sleep(0.01)
