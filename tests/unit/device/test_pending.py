"""Copies under way: finished once and in order, bounded in bytes, given up when late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tgi_patches.device.pending import Copies, LoopPoller, Pending


class Copy:
    """One that is ready when the test says so; writes down what happens to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.done = False

    def pending(self, deadline_s: float = 10.0, size_bytes: int = 1) -> Pending:
        return Pending(
            ready=lambda: self.done,
            finish=lambda: self.log.append(f"finish {self.name}"),
            deadline_s=deadline_s,
            size_bytes=size_bytes,
            wait=self._wait,
            abandoned=lambda: self.log.append(f"abandon {self.name}"),
        )

    def _wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.done = True


def test_only_what_is_ready_is_finished_and_only_once() -> None:
    log: list[str] = []
    copies = Copies(100)
    first, second = Copy("a", log), Copy("b", log)
    copies.add(first.pending())
    copies.add(second.pending())
    copies.poll(0.0)
    assert (log, len(copies)) == ([], 2)
    second.done = True
    copies.poll(1.0)
    copies.poll(2.0)
    assert (log, len(copies)) == (["finish b"], 1)
    first.done = True
    copies.poll(3.0)
    assert log == ["finish b", "finish a"]
    assert copies.counts == {"finished": 2}


def test_ready_copies_finish_in_the_order_in_which_they_began() -> None:
    log: list[str] = []
    copies = Copies(100)
    for name in "abc":
        copy = Copy(name, log)
        copy.done = True
        copies.add(copy.pending())
    copies.poll(0.0)
    assert log == ["finish a", "finish b", "finish c"]


def test_a_late_copy_is_given_up_and_its_bytes_count_until_the_device_is_done() -> None:
    log: list[str] = []
    copies = Copies(100)
    late = Copy("a", log)
    copies.add(late.pending(deadline_s=5.0, size_bytes=60))
    copies.poll(4.999)
    assert log == []
    copies.poll(5.0)
    copies.poll(6.0)
    assert log == ["abandon a"]
    assert copies.counts == {"abandoned": 1}
    assert (copies.stuck, copies.bytes_in_flight, len(copies)) == (True, 60, 0)
    late.done = True
    assert (copies.stuck, copies.bytes_in_flight) == (False, 0)
    assert log == ["abandon a"]


def test_a_copy_that_is_ready_at_its_deadline_is_not_given_up() -> None:
    log: list[str] = []
    copies = Copies(100)
    copy = Copy("a", log)
    copies.add(copy.pending(deadline_s=5.0))
    copy.done = True
    copies.poll(50.0)
    assert log == ["finish a"]


def test_a_new_copy_waits_for_the_oldest_ones_until_it_fits() -> None:
    log: list[str] = []
    copies = Copies(100)
    for name in "abc":
        copies.add(Copy(name, log).pending(size_bytes=30))
    copies.make_room(10)
    assert log == []
    copies.make_room(50)
    assert log == ["wait a", "finish a", "wait b", "finish b"]
    assert copies.counts["waited"] == 2


def test_a_copy_larger_than_the_bound_goes_alone() -> None:
    log: list[str] = []
    copies = Copies(100)
    copies.add(Copy("a", log).pending(size_bytes=1))
    copies.make_room(500)
    assert log == ["wait a", "finish a"]


def test_after_a_drain_the_device_touches_nothing_any_more() -> None:
    log: list[str] = []
    copies = Copies(100)
    copies.add(Copy("late", log).pending(deadline_s=0.0))
    copies.poll(1.0)
    copies.add(Copy("b", log).pending())
    copies.drain()
    assert log == ["abandon late", "wait b", "finish b", "wait late"]
    assert not copies.stuck


def test_one_that_raises_takes_no_other_with_it() -> None:
    log: list[str] = []
    copies = Copies(100)
    broken, other = Copy("a", log), Copy("b", log)
    broken.done = other.done = True

    def fails() -> None:
        raise ValueError("no")

    copies.add(Pending(ready=lambda: True, finish=fails, deadline_s=9.0))
    copies.add(other.pending())
    with pytest.raises(ValueError, match="no"):
        copies.poll(0.0)
    copies.poll(0.0)
    assert log == ["finish b"]
    assert len(copies) == 0


class Loop:
    """A loop whose time the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        self.calls.append((delay, callback))
        return None

    def time(self) -> float:
        return self.now_s

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for _, callback in calls:
            callback()


def test_the_loop_is_bothered_only_while_something_is_under_way() -> None:
    log: list[str] = []
    loop, copies = Loop(), Copies(100)
    poller = LoopPoller(loop, copies)
    poller.kick()
    assert loop.calls == []
    copy = Copy("a", log)
    copies.add(copy.pending())
    poller.kick()
    poller.kick()
    assert [delay for delay, _ in loop.calls] == [0.0005]
    loop.run()
    assert (log, len(loop.calls)) == ([], 1)
    copy.done = True
    loop.run()
    assert (log, loop.calls) == (["finish a"], [])


def test_the_loop_goes_on_after_one_that_raised_and_gives_up_late_ones() -> None:
    log: list[str] = []
    loop, copies = Loop(), Copies(100)
    poller = LoopPoller(loop, copies)

    def fails() -> None:
        raise ValueError("no")

    copies.add(Pending(ready=lambda: True, finish=fails, deadline_s=9.0))
    copies.add(Copy("late", log).pending(deadline_s=3.0))
    poller.kick()
    with pytest.raises(ValueError, match="no"):
        loop.run()
    loop.now_s = 3.0
    loop.run()
    assert log == ["abandon late"]
    assert loop.calls == []
