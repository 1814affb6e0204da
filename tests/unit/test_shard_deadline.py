"""A deadline that moves fires neither early nor never, and holds one timer at most.  Time is counted here."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from orchestrator.shards.http.deadline import Deadline, Within


class Timer:
    def __init__(self, when_s: float, call: Callable[[], None]) -> None:
        self.when_s, self.call, self.cancelled = when_s, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """As much of an event loop as a deadline needs."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []
        self.set = 0

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when_s, call))
        self.set += 1
        return self.timers[-1]

    def run_to(self, now_s: float) -> None:
        while due := [each for each in self.pending if each.when_s <= now_s]:
            first = min(due, key=lambda each: each.when_s)
            self.now_s = max(self.now_s, first.when_s)
            self.timers.remove(first)
            first.call()
        self.now_s = now_s

    @property
    def pending(self) -> list[Timer]:
        return [each for each in self.timers if not each.cancelled]


def deadline() -> tuple[Clock, Deadline, list[float]]:
    clock, passed = Clock(), list[float]()
    loop = cast(asyncio.AbstractEventLoop, cast(Any, clock))
    return clock, Deadline(loop, lambda: passed.append(clock.now_s)), passed


def test_it_passes_once_at_its_time() -> None:
    clock, due, passed = deadline()
    due.within(5)
    clock.run_to(104.9)
    assert passed == []
    clock.run_to(300)
    assert passed == [105]
    assert clock.pending == []


def test_it_moves_with_every_call_and_sets_a_timer_only_when_one_ran_out() -> None:
    clock, due, passed = deadline()
    for step in range(1000):  # 100 seconds
        clock.run_to(100 + step / 10)
        due.within(5)
        assert len(clock.pending) == 1
    assert clock.set <= 22
    clock.run_to(300)
    assert passed == [100 + 99.9 + 5]


def test_a_shorter_one_replaces_a_longer_one() -> None:
    clock, due, passed = deadline()
    due.within(60)
    due.within(1)
    assert len(clock.pending) == 1
    clock.run_to(300)
    assert passed == [101]


def test_off_is_off_and_a_new_one_holds_again() -> None:
    clock, due, passed = deadline()
    due.within(5)
    due.off()
    clock.run_to(104)
    due.within(5)
    clock.run_to(108.9)
    assert passed == []
    clock.run_to(300)
    assert passed == [109]
    due.within(1)
    due.off()
    due.go_on()
    clock.run_to(400)
    assert passed == [109]


def test_what_was_left_is_left_after_it_stood_still() -> None:
    clock, due, passed = deadline()
    due.within(5)
    clock.run_to(102)
    due.hold()
    due.hold()
    clock.run_to(200)
    assert passed == []
    due.go_on()
    due.go_on()
    clock.run_to(202.9)
    assert passed == []
    clock.run_to(300)
    assert passed == [203]


def test_a_new_one_counts_from_now_even_if_it_stood_still() -> None:
    clock, due, passed = deadline()
    due.within(5)
    due.hold()
    due.within(1)
    due.go_on()
    clock.run_to(300)
    assert passed == [101]


def test_closed_it_holds_no_timer_and_nothing_sets_it_going() -> None:
    clock, due, passed = deadline()
    due.within(5)
    due.hold()
    due.close()
    due.go_on()
    assert clock.pending == []
    clock.run_to(300)
    assert passed == []


def test_a_loop_that_was_busy_looks_at_its_sockets_before_it_gives_up() -> None:
    clock, due, passed = deadline()
    due.within(5)
    clock.now_s = 108.0  # three seconds late: whatever arrived meanwhile was not read yet
    (timer,) = clock.pending
    clock.timers.remove(timer)
    timer.call()
    assert passed == []
    due.within(5)  # it had arrived
    clock.run_to(112.9)
    assert passed == []
    clock.run_to(113.1)
    assert passed == [113.0]


def test_it_looks_once_and_then_gives_up() -> None:
    clock, due, passed = deadline()
    due.within(5)
    clock.now_s = 108.0
    (timer,) = clock.pending
    clock.timers.remove(timer)
    timer.call()
    clock.run_to(109.0)
    assert [round(when_s, 3) for when_s in passed] == [108.001]


async def test_within_raises_timeout_for_what_takes_too_long() -> None:
    with pytest.raises(TimeoutError):
        async with Within(0.01):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_within_passes_on_another_cancellation_and_other_errors() -> None:
    async def patient() -> None:
        async with Within(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(patient())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ValueError, match="x"):
        async with Within(60):
            raise ValueError("x")


async def test_within_does_not_hold_it_against_a_peer_that_we_were_busy() -> None:
    loop = asyncio.get_running_loop()
    async with Within(0.05):
        done = loop.create_future()
        here, there = socket.socketpair()
        with here, there:
            loop.add_reader(here.fileno(), lambda: done.done() or done.set_result(None))
            there.send(b"x")
            time.sleep(0.2)  # noqa: ASYNC251 - a busy loop is what is tried
            await done
            loop.remove_reader(here.fileno())
