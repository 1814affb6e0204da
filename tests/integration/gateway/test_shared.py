"""Requests that answer from an earlier request's record: no put leg, one wait, one get leg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Outcome
from orchestrator.shards.client import Deadlines
from orchestrator.shards.fake import FIRST_ID, PULLED_EPOCH
from tgi_patches.contract import PROTOCOL_VERSION, GetTag, PullRequest, WaitReply, parse_tag

BODY = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 20, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "model": "mine"}
PROMPT = {"prompt": "Hello", "max_tokens": 20, "model": "mine"}
ANSWER = "The capital is Paris."
WAITED = "/kv/wait/"


async def share(house: Any, path: str = "/generate", body: dict[str, Any] = BODY) -> str:
    """The handle of a request that was answered in the usual way, and whose record all others share."""
    assert (await house.http.post(path, json=body)).headers["x-orchestrator-reason"] == "pair"
    await house.settled()
    house.queue.share_of = house.queue.granted[-1]
    house.decode.seen.clear()
    return str(house.queue.share_of.handle)


def tags(house: Any) -> list[GetTag]:
    """Of the get legs that came, in order; there was no other leg."""
    names = [
        seen.body.get("model") or seen.body["parameters"]["adapter_id"] for seen in house.decode.generations()
    ]
    found = [tag for tag in map(parse_tag, names) if isinstance(tag, GetTag)]
    assert len(found) == len(names)
    return found


def waits(house: Any) -> list[str]:
    """Handles that the prefill shard's sidecar was asked for."""
    return [seen.path.removeprefix(WAITED) for seen in house.prefill.seen if seen.path.startswith(WAITED)]


async def test_stream_says_each_token_once_and_its_get_leg_names_the_owners_record(
    house: Any, payloads_of: Any
) -> None:
    handle = await share(house)
    response = await house.http.post("/generate_stream", json=BODY)
    payloads = payloads_of(response.content)
    assert [payload["token"]["id"] for payload in payloads] == [FIRST_ID + i for i in range(5)]
    assert [payload["generated_text"] for payload in payloads] == [None] * 4 + [ANSWER]
    assert tags(house) == [GetTag(handle, "prefill-0", 7, None)]
    assert response.headers["x-orchestrator-route"] == "separated"
    assert response.headers["x-orchestrator-reason"] == "shared"
    assert response.headers["x-orchestrator-import"] == "hit"
    assert len(house.prefill.generations()) == 1
    assert waits(house) == [handle, handle]


async def test_whole_answer_is_the_get_legs(house: Any) -> None:
    handle = await share(house)
    response = await house.http.post("/generate", json=BODY)
    assert response.json()["generated_text"] == ANSWER
    assert response.headers["x-orchestrator-import"] == "hit"
    assert tags(house) == [GetTag(handle, "prefill-0", 7, None)]
    assert len(house.prefill.generations()) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
async def test_openai_answer_is_complete_and_names_the_clients_model(
    house: Any, payloads_of: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    house.prefill.echoes_model = house.decode.echoes_model = True
    handle = await share(house, path, body)
    response = await house.http.post(path, json=body | {"stream": stream})
    answers = payloads_of(response.content)[:-1] if stream else [response.json()]
    assert {answer["model"] for answer in answers} == {"mine"}
    texts = [
        choice.get("text") or (choice.get("delta") or choice.get("message"))["content"]
        for answer in answers
        for choice in answer["choices"]
    ]
    assert "".join(texts) == ANSWER
    assert tags(house) == [GetTag(handle, "prefill-0", 7, None, "mine")]


async def test_who_samples_without_a_seed_gets_one_of_its_own(house: Any) -> None:
    await share(house)
    for path in ("/generate", "/generate_stream"):
        await house.http.post(path, json={"inputs": BODY["inputs"]})
    seeds = [seen.body["parameters"]["seed"] for seen in house.decode.generations()]
    assert len(set(seeds)) == 2
    assert all(isinstance(seed, int) for seed in seeds)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_get_leg_waits_until_the_owners_record_is_there(house: Any, path: str) -> None:
    await share(house)
    gate = house.prefill.hold_path(WAITED)
    asking = asyncio.create_task(house.http.post(path, json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 20)
    assert house.decode.generations() == []
    gate.opened.set()
    assert (await asking).status_code == 200
    assert len(tags(house)) == 1


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_record_that_never_comes_is_a_miss_and_an_answer(house: Any, path: str) -> None:
    handle = await share(house)
    house.prefill.found, house.decode.import_result = False, "missing"
    response = await house.http.post(path, json=BODY)
    assert response.status_code == 200
    assert response.headers["x-orchestrator-import"] == "missing"
    assert tags(house) == [GetTag(handle, "prefill-0", 7, None)]
    await house.settled()
    assert house.queue.completed[-1].imported is False
    assert house.queue.completed[-1].outcome is Outcome.DONE


async def test_owner_that_ended_at_its_first_token_does_not_end_the_others(
    house: Any, payloads_of: Any
) -> None:
    house.prefill.tokens = ("The",)
    await share(house)
    assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
    payloads = payloads_of((await house.http.post("/generate_stream", json=BODY)).content)
    assert payloads[-1]["generated_text"] == ANSWER


async def test_sidecar_that_hangs_costs_no_more_than_its_deadline(house_of: Any) -> None:
    async with house_of(deadlines=Deadlines(control_s=0.05), wait_timeout_s=0.05) as house:
        await share(house)
        house.prefill.hold_path(WAITED)
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER


@asynccontextmanager
async def asked(house: Any, listening: Any, reply: Callable[[int], WaitReply]) -> AsyncIterator[list[float]]:
    """The prefill shard's sidecar answers its n-th wait with `reply(n)`, at once; gives their timeouts."""
    timeouts: list[float] = []

    async def sidecar(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        timeouts.append(float(scope["query_string"].rpartition(b"=")[2]))
        body = orjson.dumps(reply(len(timeouts)).to_dict())
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async with listening(sidecar) as url:
        owner = house.queue.share_of.prefill
        owner.sidecar_url = url
        yield timeouts


def missing(reason: str = "missing") -> WaitReply:
    return WaitReply(PROTOCOL_VERSION, "0" * 32, found=False, reason=reason)


async def test_long_prefill_is_waited_for_in_rounds(house_of: Any, listening: Any) -> None:
    async with house_of(wait_timeout_s=4.0, shared_wait_s=14.0) as house:
        await share(house)
        found = WaitReply(PROTOCOL_VERSION, "0" * 32, found=True, prompt_tokens=321)
        async with asked(house, listening, lambda nth: found if nth == 3 else missing()) as timeouts:
            await house.http.post("/generate_stream", json=BODY)
        assert len(timeouts) == 3
        await house.settled()
        assert house.queue.completed[-1].prompt_tokens == 321


@pytest.mark.parametrize(
    ("limits", "rounds", "most_s"),
    [
        ({"wait_timeout_s": 4.0, "shared_wait_s": 14.0}, 4, 4.0),
        ({"wait_timeout_s": 4.0, "shared_wait_s": 3.0}, 1, 3.0),
        # Half of the request's time is kept for the prefill that a miss costs.
        ({"wait_timeout_s": 4.0, "shared_wait_s": 60.0, "request_timeout_s": 18.0}, 3, 4.0),
    ],
)
async def test_wait_has_an_end(
    house_of: Any, listening: Any, limits: dict[str, float], rounds: int, most_s: float
) -> None:
    async with house_of(**limits) as house:
        await share(house)
        async with asked(house, listening, lambda _: missing()) as timeouts:
            assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
        assert len(timeouts) == rounds
        assert most_s - 1 < max(timeouts) <= most_s


async def test_what_will_not_come_is_not_waited_for(house: Any, listening: Any) -> None:
    await share(house)
    async with asked(house, listening, lambda _: missing("error")) as timeouts:
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
    assert len(timeouts) == 1


async def test_nobody_waits_for_a_shard_that_is_gone(house: Any, listening: Any) -> None:
    await share(house)

    def dies(_: int) -> WaitReply:
        house.queue.set_state("prefill-0", ShardState.DEAD)
        return missing()

    async with asked(house, listening, dies) as timeouts:
        for _ in range(2):
            assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
    assert len(timeouts) == 1


async def test_record_of_another_host_is_pulled_under_the_owners_handle(house_of: Any) -> None:
    async with house_of(key=b"0123456789abcdef") as house:
        house.prefill.arena_id, house.prefill.pull_port = "far", 3101
        house.decode.arena_id, house.decode.pulls = "here", "ok"
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        handle = await share(house)
        assert (await house.http.post("/generate", json=BODY)).json()["generated_text"] == ANSWER
        [seen] = [seen for seen in house.decode.seen if seen.path == "/kv/pull"]
        request = PullRequest.from_dict(seen.body)
        assert (request.handle, request.shard, request.epoch) == (handle, "prefill-0", 7)
        assert tags(house) == [GetTag(handle, "decode-1.pulled", PULLED_EPOCH, None)]


@pytest.mark.parametrize(
    ("path", "phases"),
    [
        ("/generate", {"queue", "relay", "decode"}),
        ("/generate_stream", {"queue", "relay", "decode_wait", "decode"}),
    ],
)
async def test_end_tells_the_queue_its_phases_and_no_record_of_its_own(
    house: Any, path: str, phases: set[str]
) -> None:
    owner = await share(house)
    await house.http.post(path, json=BODY)
    await house.settled()
    completion = house.queue.completed[-1]
    assert (completion.outcome, completion.imported) == (Outcome.DONE, True)
    assert set(completion.phases_s) == phases
    assert completion.generated_tokens == 5
    assert [relayed.handle for relayed in house.queue.imported if relayed.handle != owner] == []
    assert house.reserved == (0, 0, 0)


async def test_client_that_leaves_while_it_waits_gives_everything_back(house: Any) -> None:
    await share(house)
    gate = house.prefill.hold_path(WAITED)
    asking = asyncio.create_task(house.http.post("/generate_stream", json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 20)
    assert house.reserved[1:] == (1, 0)
    asking.cancel()
    await asyncio.wait([asking])
    await house.settled()
    assert house.queue.completed[-1].outcome is Outcome.CANCELLED
    assert house.decode.generations() == []
    assert house.reserved == (0, 0, 0)
