"""Calls to an engine that are cancelled while it is at them, and what an engine that is away is called."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import docker
import pytest
import requests

from orchestrator.errors import Unreachable
from orchestrator.shards.docker.engine import Engine, EngineFacts

FACTS = EngineFacts("28.0", (1, 48), "Engine", False, (), 0, 1, "", False)


class Client:
    """An engine that is slow: it does something once it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.done: list[str] = []

    def make(self) -> str:
        self.begun.set()
        assert self.go_on.wait(10)
        self.done.append("made")
        return "id"


def engine_of(client: object) -> Engine:
    return Engine(cast("docker.DockerClient", client), "unix:///x", FACTS)


async def test_what_changes_something_is_over_before_a_cancelled_caller_goes_on() -> None:
    client = Client()
    acting = asyncio.create_task(engine_of(client).act("It was not made", lambda c: cast(Any, c).make()))
    await asyncio.to_thread(client.begun.wait, 10)
    acting.cancel()
    done, _ = await asyncio.wait([acting], timeout=0.2)
    assert not done, "the engine is still at it"
    client.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await acting
    assert client.done == ["made"]


async def test_what_only_looks_is_left_at_once() -> None:
    client = Client()
    looking = asyncio.create_task(engine_of(client).call("It was not seen", lambda c: cast(Any, c).make()))
    await asyncio.to_thread(client.begun.wait, 10)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert client.done == []
    client.go_on.set()


async def test_an_engine_that_is_away_is_told_by_the_systems_own_word() -> None:
    def fail(_client: object) -> None:
        aborted = OSError("Connection aborted.", FileNotFoundError(2, "No such file or directory"))
        raise requests.exceptions.ConnectionError(aborted)

    with pytest.raises(Unreachable) as told:
        await engine_of(object()).call("Nothing was listed", fail)
    assert str(told.value) == (
        "Nothing was listed: the engine at unix:///x does not answer (No such file or directory)."
    )
