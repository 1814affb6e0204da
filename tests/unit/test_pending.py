from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.pending import Pending, Place
from orchestrator.core.ticket import Ticket


def ticket(handle: str) -> Ticket:
    return Ticket(handle, "g.1", 10, 10, created_s=0.0, deadline_s=60.0)


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
