"""A deadline that moves fires neither early nor never, and holds one timer at most.  Time is counted here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from orchestrator.shards.http.deadline import Deadline


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
