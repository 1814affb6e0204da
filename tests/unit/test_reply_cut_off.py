"""A request that a stopping gateway no longer waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from orchestrator.api.reply import answer


class Slow:
    """A pipeline that begins an answer where it is told to, and never ends it."""

    settings = SimpleNamespace(keep_alive_s=60.0)

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    async def serve(self, job: Any, out: Any) -> None:
        if self._begins:
            await out.start({})
        await asyncio.Event().wait()


async def nothing_comes() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody speaks")


async def cut_off(*, begins: bool) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    job: Any = SimpleNamespace(request_id="abc", route="generate", stream=begins)
    pipeline: Any = Slow(begins=begins)
    serving = asyncio.create_task(answer(pipeline, job, nothing_comes, send))
    await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    return said


async def test_it_hears_so_in_json() -> None:
    head, body = await cut_off(begins=False)
    assert (head["status"], dict(head["headers"])[b"x-request-id"]) == (503, b"abc")
    assert orjson.loads(body["body"])["error"] == "The gateway is shutting down."
    assert not body.get("more_body", False)


async def test_an_answer_that_has_begun_ends_without_another_head() -> None:
    said = await cut_off(begins=True)
    assert [message["type"] for message in said].count("http.response.start") == 1
    assert said[0]["status"] == 200
