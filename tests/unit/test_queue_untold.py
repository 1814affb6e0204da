"""What a heartbeat tells Redis again, and when it is over with it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from orchestrator.core.ticket import Choice, Grant, Leg, Relayed, Ticket
from orchestrator.queues import scripts
from orchestrator.queues.keys import Keys
from orchestrator.queues.open import OpenRequests
from orchestrator.queues.untold import Untold


@pytest.fixture
async def requests() -> OpenRequests:
    """`granted` has shards, `waits` has none, `new` is not in Redis yet."""
    made = OpenRequests()
    for handle in ("granted", "waits", "new"):
        request = made.add(Ticket(handle, "g.1", 10, 5, created_s=0.0, deadline_s=1.0))
        request.announced = handle != "new"
    prefill, decode = Leg("p0", 1, "http://p0"), Leg("d0", 1, "http://d0")
    grant = Grant("granted", Choice.SEPARATED, "pair", decode, prefill, 16, 100, 5)
    request = made.get("granted")
    assert request is not None
    made.settle(request.ticket, grant)
    return made


@pytest.fixture
def untold() -> Untold:
    return Untold(Keys("test"), "g.1", 8)


def said(untold: Untold, requests: OpenRequests, missing: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Script and handle of each call."""
    names = {scripts.SUBMIT: "submit", scripts.RESTORE: "restore", scripts.RELAYED: "relayed"}
    calls, _ = untold.telling(missing, requests.get)
    return [(names[call.script], str(call.args[0])) for call in calls]


async def test_what_redis_misses_is_told_by_what_became_of_it(untold: Untold, requests: OpenRequests) -> None:
    missing = ["waits", "granted", "new", "over"]
    assert said(untold, requests, missing) == [("submit", "waits"), ("restore", "granted")]


async def test_an_own_grant_is_told_once_also_where_redis_misses_it(
    untold: Untold, requests: OpenRequests
) -> None:
    untold.add("granted")
    assert said(untold, requests, ["granted"]) == [("restore", "granted")]


async def test_an_import_is_told_before_what_is_held_since(untold: Untold, requests: OpenRequests) -> None:
    requests.relayed("granted")
    untold.add("granted", Relayed("granted"))
    untold.add("granted")  # decided here as well: the import is not forgotten
    assert said(untold, requests) == [("relayed", "granted"), ("restore", "granted")]


async def test_what_is_told_or_over_is_not_told_again(untold: Untold, requests: OpenRequests) -> None:
    untold.add("granted")
    _, told = untold.telling((), requests.get)
    assert said(untold, requests) == [("restore", "granted")]  # nobody heard it yet
    untold.told(told)
    assert said(untold, requests) == []
    untold.add("granted")
    untold.forget("granted")
    assert said(untold, requests) == []


async def test_what_came_while_it_was_told_is_told_next(untold: Untold, requests: OpenRequests) -> None:
    untold.add("granted")
    _, told = untold.telling((), requests.get)
    untold.add("granted", Relayed("granted"))
    untold.told(told)
    assert said(untold, requests) == [("relayed", "granted"), ("restore", "granted")]
