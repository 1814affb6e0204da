"""What answers say of the deployment's state, who is refused by it, and what the queue hears of a record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api import jobs
from orchestrator.core.decision import Decision, Mode
from orchestrator.core.ticket import Choice, Grant, Outcome, Relayed, Ticket
from orchestrator.shards.fake import Part
from tgi_patches.contract import Role

BODY = {"inputs": "What is the capital of France?", "parameters": {"max_new_tokens": 20, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
PROMPT = {"prompt": "Hello", "max_tokens": 20}
WHOLE = [("/generate", BODY), ("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]
STREAMS = [
    ("/generate_stream", BODY),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", PROMPT | {"stream": True}),
]
TIGHT = Mode(level=2, output_cap=3, reason="two of three\ndecode shards are gone")


def comments(events: list[Any]) -> list[bytes]:
    return [event.raw for event in events if event.data is None]


# --- capped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), WHOLE)
async def test_capped_answer_says_so_in_its_head_and_ends_with_length(
    house: Any, path: str, body: dict[str, Any]
) -> None:
    house.queue.mode = TIGHT
    response = await house.http.post(path, json=body)
    assert response.headers["x-orchestrator-output-cap"] == "3"
    assert response.headers["x-orchestrator-mode"] == "2"
    answer = response.json()
    ended = answer["details"] if "details" in answer else answer["choices"][0]
    assert ended["finish_reason"] == "length"


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.MIXED, Role.MIXED)])
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_capped_stream_says_so_in_one_comment_before_it_ends(
    house_of: Any, events_of: Any, path: str, body: dict[str, Any], roles: tuple[Role, Role]
) -> None:
    async with house_of(roles=roles) as house:
        house.queue.mode = TIGHT
        response = await house.http.post(path, json=body)
        assert response.headers["x-orchestrator-output-cap"] == "3"
        events = events_of(response.content)
        told = b": orchestrator capped at 3 tokens: two of three decode shards are gone\n\n"
        assert comments(events) == [told]
        assert events[-1].data is not None
        assert b'"length"' in response.content
        assert len([event for event in events if event.data not in (None, b"[DONE]")]) == 3


async def test_cap_without_a_reason_is_told_without_one(house: Any, events_of: Any) -> None:
    house.queue.mode = Mode(level=1, output_cap=3)
    response = await house.http.post("/generate_stream", json=BODY)
    assert comments(events_of(response.content)) == [b": orchestrator capped at 3 tokens\n\n"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_client_that_wants_no_more_than_the_cap_is_told_of_none(
    house: Any, events_of: Any, path: str
) -> None:
    house.queue.mode = TIGHT
    body = BODY | {"parameters": {"max_new_tokens": 3, "details": True}}
    response = await house.http.post(path, json=body)
    assert "x-orchestrator-output-cap" not in response.headers
    assert response.headers["x-orchestrator-mode"] == "2"
    assert b"capped" not in response.content


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [*WHOLE, *STREAMS])
async def test_in_the_normal_mode_nothing_is_told(
    house: Any, events_of: Any, path: str, body: dict[str, Any]
) -> None:
    response = await house.http.post(path, json=body)
    told = {name for name in response.headers if name.startswith("x-orchestrator-")}
    assert told - {"x-orchestrator-import"} == {"x-orchestrator-route", "x-orchestrator-reason"}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_degraded_queue_is_told_in_a_word(house: Any, path: str) -> None:
    house.queue.degraded = "Redis at 10.0.0.7 does not answer."
    response = await house.http.post(path, json=BODY)
    assert response.headers["x-orchestrator-degraded"] == "1"
    assert b"10.0.0.7" not in response.content
    house.queue.degraded = None
    assert "x-orchestrator-degraded" not in (await house.http.post(path, json=BODY)).headers


@pytest.mark.parametrize(("path", "body"), [*WHOLE, *STREAMS])
async def test_lower_priorities_are_shed_before_they_have_a_ticket(
    house: Any, path: str, body: dict[str, Any]
) -> None:
    house.queue.mode = Mode(level=4, shed_below=1)
    response = await house.http.post(path, json=body)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json() == {
        "error": "The deployment is degraded and serves only requests of priority high or higher now: "
        "try again later.",
        "error_type": "overloaded",
    }
    assert house.queue.tickets == []
    assert house.prefill.seen + house.decode.seen == []


async def test_priority_of_the_bound_is_not_shed(house: Any) -> None:
    house.queue.mode = Mode(level=4, shed_below=0)
    assert (await house.http.post("/generate", json=BODY)).status_code == 200


# --- predictions ----------------------------------------------------------------------------------


def foresee(house: Any, monkeypatch: pytest.MonkeyPatch, predicted: dict[str, float]) -> None:
    """Let every grant carry these predictions."""
    apply = house.queue._apply

    def with_prediction(ticket: Ticket, decision: Decision) -> None:
        assert isinstance(decision, Grant)
        apply(ticket, replace(decision, predicted=predicted))

    monkeypatch.setattr(house.queue, "_apply", with_prediction)


async def test_prediction_is_told_who_asks(
    house: Any, events_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(house, monkeypatch, {"separated": 0.4119, "mixed": 0.388})
    asked = {"x-orchestrator-debug": "1"}
    told = "separated=0.412 mixed=0.388"
    whole = await house.http.post("/generate", json=BODY, headers=asked)
    assert whole.headers["x-orchestrator-predicted"] == told
    stream = await house.http.post("/generate_stream", json=BODY, headers=asked)
    assert stream.headers["x-orchestrator-predicted"] == told
    [comment] = comments(events_of(stream.content))
    assert comment.endswith(f" predicted {told}\n\n".encode())
    silent = await house.http.post("/generate", json=BODY)
    assert "x-orchestrator-predicted" not in silent.headers


async def test_without_a_prediction_none_is_told(
    house: Any, events_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(house, monkeypatch, {})
    response = await house.http.post("/generate_stream", json=BODY, headers={"x-orchestrator-debug": "1"})
    assert "x-orchestrator-predicted" not in response.headers
    assert b"predicted" not in response.content


# --- what the queue hears -------------------------------------------------------------------------


async def test_record_is_given_back_once_while_decode_still_streams(house: Any) -> None:
    began_s = time.time()
    gate = house.decode.hold(Part.GET, 1)
    asking = asyncio.create_task(house.http.post("/generate_stream", json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 20)
    await asyncio.wait_for(house.queue.relays.wait(), 20)
    assert house.reserved[1:] == (1, 0)
    gate.opened.set()
    await asking
    await house.settled()
    assert house.reserved == (0, 0, 0)
    [relayed] = house.queue.imported
    [completion] = house.queue.completed
    assert (relayed.handle, relayed.prompt_tokens) == (completion.handle, 9)
    assert began_s <= relayed.first_token_s <= time.time()
    assert relayed.first_token_s == completion.first_token_s
    assert relayed.prefill_s == completion.phases_s["prefill"] > 0
    assert relayed.relay_s == completion.phases_s["relay"] > 0


async def test_record_of_a_whole_answer_is_given_back_once_it_must_have_been_read(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.pipeline.READ_WITHIN_S", 0.01)
    gate = house.decode.hold(Part.GET, 1)
    asking = asyncio.create_task(house.http.post("/generate", json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 20)
    await asyncio.wait_for(house.queue.relays.wait(), 20)
    assert house.reserved[1:] == (1, 0)
    gate.opened.set()
    await asking
    await house.settled()
    [relayed] = house.queue.imported
    assert relayed.first_token_s == house.queue.completed[0].first_token_s > 0
    assert relayed.prefill_s > 0
    assert house.reserved == (0, 0, 0)


async def test_second_word_of_the_same_record_frees_nothing(house: Any) -> None:
    gate = house.decode.hold(Part.GET, 1)
    asking = asyncio.create_task(house.http.post("/generate_stream", json=BODY))
    await asyncio.wait_for(gate.reached.wait(), 20)
    await asyncio.wait_for(house.queue.relays.wait(), 20)
    held = house.reserved
    house.queue.relayed(Relayed(house.queue.imported[0].handle))
    assert house.reserved == held
    assert len(house.queue.imported) == 1
    gate.opened.set()
    await asking


@pytest.mark.parametrize(("path", "known"), [("/generate_stream", True), ("/generate", False)])
async def test_time_of_a_mixed_answers_first_token_is_told_where_it_is_known(
    house_of: Any, path: str, known: bool
) -> None:
    async with house_of(roles=(Role.MIXED, Role.MIXED)) as house:
        began_s = time.time()
        await house.http.post(path, json=BODY)
        await house.settled()
        told_s = house.queue.completed[0].first_token_s
        assert began_s <= told_s <= time.time() if known else told_s == 0
        assert house.queue.imported == []


async def test_refused_request_has_no_first_token(house: Any) -> None:
    house.prefill.refuses = (429, {"error": "Model is overloaded", "error_type": "overloaded"})
    await house.http.post("/generate_stream", json=BODY)
    await house.settled()
    [completion] = house.queue.completed
    assert (completion.outcome, completion.first_token_s) == (Outcome.FAILED, 0.0)


# --- tickets --------------------------------------------------------------------------------------


async def test_ticket_carries_the_choice_that_the_job_names(house: Any, monkeypatch: Any) -> None:
    await house.http.post("/generate", json=BODY)
    assert house.queue.tickets[0].choice is None
    of_caller = jobs.of_caller
    monkeypatch.setattr(jobs, "of_caller", lambda caller: of_caller(caller) | {"choice": Choice.MIXED})
    await house.http.post("/generate", json=BODY)
    assert house.queue.tickets[1].choice is Choice.MIXED


async def test_only_what_can_be_split_has_a_fingerprint(house: Any) -> None:
    await house.http.post("/generate", json=BODY)
    await house.http.post("/v1/chat/completions", json=CHAT)
    await house.http.post("/v1/completions", json=PROMPT)
    await house.http.post("/generate", json={"inputs": "x", "parameters": {"decoder_input_details": True}})
    *split, whole = house.queue.tickets
    assert all(len(ticket.prompt_hash) == 32 and ticket.simhash > 0 for ticket in split)
    assert (whole.splittable, whole.prompt_hash, whole.simhash) == (False, "", 0)
    assert [ticket.prefix for ticket in house.queue.tickets] == [0] * 4
    # The chat says the same word as the completion, and is another prompt.
    assert split[1].simhash == split[2].simhash
    assert split[1].prompt_hash != split[2].prompt_hash
    for end in ("one", "two"):
        await house.http.post(
            "/generate", json={"inputs": "word " * 300 + end, "parameters": {"truncate": 9}}
        )
    one, two = house.queue.tickets[-2:]
    assert one.prefix == two.prefix > 0
    assert one.prompt_hash != two.prompt_hash
