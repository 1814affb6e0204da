"""Records that have to be fetched from another host before the get leg."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from orchestrator.core.sse import Event
from orchestrator.shards.fake import PULLED_EPOCH, Part, Seen
from tgi_patches.contract import GetTag, PullRequest, parse_tag
from tgi_patches.key import signed

KEY = b"0123456789abcdef"
BODY = {"inputs": "x", "parameters": {"max_new_tokens": 9, "details": True}}
ANSWER = "The capital is Paris."
House = Any


@asynccontextmanager
async def apart(house_of: Any, result: str | None = "ok", **settings: Any) -> AsyncIterator[House]:
    """A pair on two hosts; a pull comes to `result`."""
    async with house_of(key=KEY, **settings) as house:
        house.prefill.arena_id, house.prefill.pull_port = "far", 3101
        house.decode.arena_id, house.decode.pulls = "here", result
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        yield house


def asked_pulls(house: House) -> list[Seen]:
    return [seen for seen in house.decode.seen if seen.path == "/kv/pull"]


def got_from(house: House) -> tuple[str, int]:
    """Shard and epoch that the one get leg named."""
    (get,) = house.decode.generations(Part.GET)
    tag = parse_tag(get.body["parameters"]["adapter_id"])
    assert isinstance(tag, GetTag)
    return tag.shard, tag.epoch


async def counted(house: House, metric: str) -> str:
    """The value of a metric's line, with its labels written as Prometheus does."""
    lines = (await house.http.get("/metrics")).text.splitlines()
    return next((line.split()[-1] for line in lines if line.startswith(f"{metric} ")), "")


async def test_a_record_is_pulled_by_a_signed_request_and_the_get_leg_names_the_copy(house_of: Any) -> None:
    async with apart(house_of) as house:
        answer = await house.http.post("/generate", json=BODY)
        assert answer.json()["generated_text"] == ANSWER
        assert answer.headers["x-orchestrator-route"] == "separated"
        (seen,) = asked_pulls(house)
        request = PullRequest.from_dict(seen.body)
        grant = house.queue.granted[0]
        assert (request.handle, request.shard, request.epoch) == (grant.handle, "prefill-0", 7)
        assert request.address == grant.pull == "127.0.0.1:3101"
        assert 0 < request.timeout_s <= 5
        assert signed(KEY, request.signature, *request.signed())
        assert got_from(house) == ("decode-1.pulled", PULLED_EPOCH)
        assert await counted(house, 'orchestrator_kv_pulls_total{result="ok"}') == "1.0"
        assert await counted(house, "orchestrator_kv_pulled_bytes_total") == "576.0"  # 9 tokens of 64 bytes
        assert await counted(house, "orchestrator_kv_pull_seconds_count") == "1.0"


async def test_a_stream_is_pulled_too_and_is_one_stream(
    house_of: Any, events_of: Callable[[bytes], list[Event]]
) -> None:
    async with apart(house_of) as house:
        answer = await house.http.post("/generate_stream", json=BODY)
        tokens = [
            orjson.loads(event.data)["token"]["text"] for event in events_of(answer.content) if event.data
        ]
        assert "".join(tokens) == ANSWER
        assert len(asked_pulls(house)) == 1
        assert got_from(house) == ("decode-1.pulled", PULLED_EPOCH)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("link", "link"),
        ("checksum", "checksum"),
        ("die", "lost"),
        ("", "error"),
        ("no word of ours", "error"),
    ],
)
async def test_without_the_record_the_get_leg_goes_out_all_the_same_and_the_reason_is_counted(
    house_of: Any, result: str, told: str
) -> None:
    async with apart(house_of, result) as house:
        answer = await house.http.post("/generate", json=BODY)
        assert answer.json()["generated_text"] == ANSWER
        assert got_from(house) == ("prefill-0", 7)  # not there: the shard misses it and computes the prompt
        assert await counted(house, f'orchestrator_kv_pulls_total{{result="{told}"}}') == "1.0"
        assert await counted(house, "orchestrator_kv_pulled_bytes_total") == "0.0"
        assert house.reserved == (0, 0, 0)


@pytest.mark.parametrize(
    ("result", "told"),
    [("link", "link"), ("checksum", "checksum"), ("missing", "missing"), ("die", "error"), ("ok", "missing")],
)
async def test_a_record_that_is_missing_because_of_its_pull_is_a_miss_for_the_pull_s_reason(
    house_of: Any, result: str, told: str
) -> None:
    async with apart(house_of, result) as house:
        house.decode.import_result = "missing"
        answer = await house.http.post("/generate", json=BODY)
        assert answer.headers["x-orchestrator-import"] == told
        await house.http.post("/generate_stream", json=BODY)
        assert await counted(house, f'orchestrator_kv_imports_total{{result="{told}"}}') == "2.0"
        house.decode.import_result = "layout"  # what the shard itself knows better stands
        assert (await house.http.post("/generate", json=BODY)).headers["x-orchestrator-import"] == "layout"
        await house.settled()
        assert [end.imported for end in house.queue.completed] == [False] * 3


async def test_a_sidecar_that_hangs_costs_no_more_than_the_time_for_records(house_of: Any) -> None:
    async with apart(house_of, wait_timeout_s=0.2) as house:
        house.decode.hold_path("/kv/pull")
        house.decode.import_result = "missing"
        answer = await house.http.post("/generate", json=BODY)
        assert answer.json()["generated_text"] == ANSWER
        assert answer.headers["x-orchestrator-import"] == "link"
        assert await counted(house, 'orchestrator_kv_pulls_total{result="timeout"}') == "1.0"
        await asyncio.wait_for(house.decode.left.wait(), 20)
        (seen,) = asked_pulls(house)
        assert PullRequest.from_dict(seen.body).timeout_s <= 0.2


async def test_a_client_that_leaves_during_the_pull_ends_it(house_of: Any) -> None:
    async with apart(house_of) as house:
        gate = house.decode.hold_path("/kv/pull")
        asking = asyncio.create_task(house.http.post("/generate_stream", json=BODY))
        await asyncio.wait_for(gate.reached.wait(), 20)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.wait_for(house.decode.left.wait(), 20)
        await house.settled()
        assert [str(end.outcome) for end in house.queue.completed] == ["cancelled"]
        assert house.decode.generations() == []
        assert house.reserved == (0, 0, 0)


async def test_nothing_is_pulled_where_no_record_came_or_the_answer_is_complete(house_of: Any) -> None:
    async with apart(house_of) as house:
        house.prefill.found = False
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
        assert got_from(house) == ("prefill-0", 7)
        house.prefill.found = True
        house.prefill.tokens = house.prefill.tokens[:1]
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == "The"
        house.prefill.end = "length"  # only the record says that the answer is complete
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == "The"
        assert asked_pulls(house) == []


async def test_a_stream_whose_end_only_the_record_tells_goes_on_and_so_its_record_is_pulled(
    house_of: Any,
) -> None:
    async with apart(house_of) as house:
        house.prefill.tokens, house.prefill.end = house.prefill.tokens[:1], "length"
        await house.http.post("/generate_stream", json=BODY)
        assert len(asked_pulls(house)) == 1
        assert got_from(house) == ("decode-1.pulled", PULLED_EPOCH)


async def test_wait_and_pull_go_to_the_sidecars_own_address(house_of: Any, listening: Any) -> None:
    async with apart(house_of) as house:
        sidecars: list[str] = []

        async def sidecar(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                for step in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{step}.complete"})
                return
            sidecars.append(scope["path"].rpartition("/")[0])
            shard = house.prefill if "/wait/" in scope["path"] else house.decode
            await shard(scope, receive, send)

        async with listening(sidecar) as url:
            views = house.prefill.view(), house.decode.view()
            house.queue.set_shards([dataclasses.replace(view, sidecar_url=url) for view in views])
            assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
        assert sidecars == ["/kv/wait", "/kv"]
