from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.pending import Pending, Place
from orchestrator.core.ticket import Ticket


def ticket(handle: str, priority: int = 0) -> Ticket:
    return Ticket(handle, "g.1", 10, 10, created_s=0.0, deadline_s=60.0, priority=priority)


def handles(pending: Pending) -> list[str]:
    return [one.handle for one in pending]


def test_a_claimed_ticket_takes_its_place_before_newer_ones() -> None:
    pending = Pending()
    pending.add({(5, 0): ticket("b"), (7, 0): ticket("d")})
    pending.add({(3, 1): ticket("a"), (5, 1): ticket("c")})
    assert handles(pending) == ["a", "b", "c", "d"]


def test_a_ticket_that_arrives_twice_stands_once() -> None:
    pending = Pending()
    pending.add({(1, 0): ticket("a"), (2, 0): ticket("b")})
    pending.add({(1, 0): ticket("a")})
    pending.add({(3, 0): ticket("a")})
    assert handles(pending) == ["b", "a"]
    pending.forget(["a", "unknown"])
    assert handles(pending) == ["b"]
    assert len(pending) == 1


def name_at(place: Place) -> str:
    """Entries never change, and every handle has entries at several places."""
    return "abcdefgh"[(place[0] + place[1]) % 8]


@given(st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=4, unique=True)))
def test_order_is_by_place_whatever_the_order_of_arrival(batches: list[list[Place]]) -> None:
    pending, model = Pending(), dict[str, Place]()
    for batch in batches:
        pending.add({place: ticket(name_at(place)) for place in batch})
        for place in sorted(batch):
            model[name_at(place)] = place
    assert handles(pending) == sorted(model, key=lambda name: model[name])


LOW, NORMAL, HIGH = -1, 0, 1


def test_of_tickets_that_wait_together_the_higher_class_goes_first() -> None:
    pending = Pending()
    pending.add({(0, 0): ticket("low", LOW), (10, 0): ticket("normal"), (20, 0): ticket("high", HIGH)})
    assert handles(pending) == ["high", "normal", "low"]
    pending.add({(30, 0): ticket("another", HIGH)})
    assert handles(pending) == ["high", "another", "normal", "low"]


def test_a_class_is_worth_thirty_seconds_of_waiting() -> None:
    pending = Pending()
    pending.add({(0, 0): ticket("waited", LOW), (29_999, 0): ticket("normal")})
    assert handles(pending) == ["normal", "waited"]
    pending.add({(30_001, 0): ticket("later"), (60_001, 0): ticket("high", HIGH)})
    assert handles(pending) == ["normal", "waited", "later", "high"]


arrivals = st.lists(
    st.tuples(st.integers(0, 40_000), st.sampled_from([LOW, NORMAL, HIGH]), st.booleans()), max_size=30
)


@given(arrivals)
def test_no_place_is_lost_within_a_class_and_nobody_is_overtaken_by_what_came_a_minute_later(
    arrivals: list[tuple[int, int, bool]],
) -> None:
    pending, places, now_ms = Pending(), dict[str, Place](), 0
    batch: dict[Place, Ticket] = {}
    for number, (pause_ms, priority, last_of_batch) in enumerate(arrivals):
        now_ms += pause_ms
        place = (now_ms, number)
        places[str(number)] = place
        batch[place] = ticket(str(number), priority)
        if last_of_batch:
            pending.add(batch)
            batch = {}
    pending.add(batch)
    served = list(pending)
    assert sorted(one.handle for one in served) == sorted(places)
    for position, first in enumerate(served):
        for second in served[position + 1 :]:
            first_ms, second_ms = places[first.handle], places[second.handle]
            if first.priority <= second.priority:
                assert first_ms < second_ms
            else:
                classes = first.priority - second.priority
                assert first_ms[0] - second_ms[0] <= classes * 30_000


@given(st.integers(2_000, 20_000), st.sampled_from([NORMAL, HIGH]))
def test_a_low_ticket_is_served_under_any_flow_of_higher_ones(pause_ms: int, priority: int) -> None:
    """One higher ticket comes and one ticket is served per `pause_ms`: the queue never empties."""
    pending = Pending()
    pending.add({(0, 0): ticket("low", LOW)})
    for number in range(1, 60_000 // pause_ms + 3):
        pending.add({(number * pause_ms, 0): ticket(str(number), priority)})
        first = next(iter(pending))
        if first.handle == "low":
            assert number * pause_ms >= (priority - LOW) * 30_000
            return
        pending.forget([first.handle])
    raise AssertionError("the low ticket starved")
