"""Answers of a TGI server, in every shape it may send them, come out in one form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import Unreachable
from orchestrator.verify.answer import Answer, Route, Token
from orchestrator.verify.asking import NotTgi, ask, get_json
from orchestrator.verify.cases import Case, Via, chat, raw

WHOLE = {
    "generated_text": " Paris.",
    "details": {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": 3,
        "prefill": [],
        "tokens": [
            {"id": 1, "text": " Paris", "logprob": -0.5, "special": False},
            {"id": 2, "text": ".", "logprob": -1.0, "special": False},
        ],
        "top_tokens": [[{"id": 1, "text": " Paris", "logprob": -0.5, "special": False}], []],
    },
}
TOKENS = (Token(1, " Paris", -0.5, (Token(1, " Paris", -0.5),)), Token(2, ".", -1.0))
SEPARATED = {"x-orchestrator-route": "separated", "x-orchestrator-import": "hit", "x-prompt-tokens": "7"}


async def answer_of(case: Case, respond: Callable[[httpx.Request], httpx.Response]) -> Answer:
    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(transport=transport, base_url="http://tgi") as client:
        return await ask(client, case)


def stream_of(*lines: str) -> httpx.Response:
    return httpx.Response(200, headers={"x-orchestrator-route": "separated"}, text="".join(lines))


def data(payload: Any) -> str:
    return f"data:{json.dumps(payload, ensure_ascii=False)}\n\n"


def token_event(index: int, **last: Any) -> str:
    token = WHOLE["details"]["tokens"][index]  # type: ignore[index]
    top = WHOLE["details"]["top_tokens"][index]  # type: ignore[index]
    event = {"index": index + 1, "token": token, "top_tokens": top, "generated_text": None, "details": None}
    return data(event | last)


LAST = {
    "generated_text": " Paris.",
    "details": {"finish_reason": "length", "generated_tokens": 2, "seed": 3, "input_length": 7},
}


async def test_a_whole_answer_and_a_stream_of_the_same_tokens_are_equal_but_for_nothing() -> None:
    whole = await answer_of(raw("case", "x", 2), lambda _: httpx.Response(200, json=WHOLE, headers=SEPARATED))
    streamed = await answer_of(
        raw("case", "x", 2, via=Via.GENERATE_STREAM),
        lambda _: stream_of(
            ": keep-alive\n\n",
            token_event(0),
            token_event(1, **LAST),
            ": orchestrator route=separated import=hit\n\n",
        ),
    )
    expected = Answer(200, " Paris.", TOKENS, "length", 2, 7, 3, Route("separated", "", "hit"))
    assert whole == expected
    assert streamed == expected


async def test_the_request_goes_out_as_the_case_says_and_asks_for_the_route() -> None:
    seen: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=WHOLE)

    await answer_of(raw("case", "été", 2, stop=["."]), respond)
    assert (seen[0].method, seen[0].url.path) == ("POST", "/generate")
    assert seen[0].headers["x-orchestrator-debug"] == "1"
    assert json.loads(seen[0].content) == {
        "inputs": "été",
        "parameters": {"max_new_tokens": 2, "details": True, "stop": ["."]},
    }


async def test_a_chat_stream_collects_text_logprobs_finish_and_usage() -> None:
    def chunk(text: str, finish: str | None, logprob: float) -> str:
        content = [{"token": text, "logprob": logprob, "top_logprobs": []}]
        choice = {"delta": {"content": text}, "finish_reason": finish, "logprobs": {"content": content}}
        return data({"choices": [choice], "usage": None})

    answer = await answer_of(
        chat("case", ["hi"], 2, via=Via.CHAT_STREAM),
        lambda _: stream_of(
            chunk("Pa", None, -0.5),
            chunk("ris", "stop", -1.0),
            data({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 7}}),
            "data: [DONE]\n\n",
            ": orchestrator route=separated import=checksum\n\n",
        ),
    )
    tokens = (Token(None, "Pa", -0.5), Token(None, "ris", -1.0))
    assert answer == Answer(200, "Paris", tokens, "stop", 2, 7, None, Route("separated", "", "checksum"))


CALLED = (("get_weather", '{"unit":"c"}'),)


async def test_a_function_call_is_read_whole_and_from_a_stream() -> None:
    function = {"name": "get_weather", "description": None, "arguments": '{"unit":"c"}'}
    message = {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}
    usage = {"completion_tokens": 2, "prompt_tokens": 7}
    whole = {"choices": [{"message": message, "finish_reason": "stop", "logprobs": None}], "usage": usage}
    answer = await answer_of(chat("case", ["hi"], 2), lambda _: httpx.Response(200, json=whole))
    assert (answer.calls, answer.text) == (CALLED, "")

    def piece(name: str | None, arguments: str, finish: str | None = None) -> str:
        call = {"index": 0, "id": "0", "type": "function", "function": {"name": name, "arguments": arguments}}
        return data({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": finish}], "usage": None})

    streamed = await answer_of(
        chat("case", ["hi"], 2, via=Via.CHAT_STREAM),
        lambda _: stream_of(
            piece("get_weather", ""),
            piece(None, '{"unit":'),
            piece(None, '"c"}', "stop"),
            data({"choices": [], "usage": usage}),
        ),
    )
    assert (streamed.calls, streamed.text, streamed.complete) == (CALLED, "", True)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ((token_event(0),), "the stream ended without its last event"),
        ((token_event(0), data({"error": "shard lost", "error_type": "generation"})), "shard lost"),
        ((data({"error": {"message": "shard lost"}}),), "shard lost"),
    ],
)
async def test_a_stream_that_breaks_is_an_error_although_its_status_is_200(
    lines: tuple[str, ...], error: str
) -> None:
    answer = await answer_of(raw("case", "x", 2, via=Via.GENERATE_STREAM), lambda _: stream_of(*lines))
    assert (answer.status, answer.error, answer.complete) == (200, error, False)


async def test_a_refusal_keeps_its_status_and_sentence() -> None:
    body = {"error": "`inputs` cannot be empty", "error_type": "validation"}
    answer = await answer_of(raw("case", "", 2), lambda _: httpx.Response(422, json=body))
    assert (answer.status, answer.error, answer.complete) == (422, "`inputs` cannot be empty", False)


async def test_a_server_that_does_not_answer_is_unreachable() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Unreachable, match=r"http://tgi.* refused"):
        await answer_of(raw("case", "x", 2), respond)


async def test_a_server_of_another_kind_is_told_from_tgi() -> None:
    with pytest.raises(NotTgi, match="shape that TGI does not use"):
        await answer_of(raw("case", "x", 2), lambda _: httpx.Response(200, json={"text": "hi"}))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    async with httpx.AsyncClient(transport=transport, base_url="http://tgi") as client:
        with pytest.raises(NotTgi, match="not JSON"):
            await get_json(client, "/info")


@given(st.data())
async def test_a_stream_is_read_the_same_however_its_bytes_are_cut(draw: st.DataObject) -> None:
    line_end = draw.draw(st.sampled_from(["\n", "\r\n"]))
    events = (": keep-alive\n\n", token_event(0), token_event(1, **LAST), ": orchestrator import=hit\n\n")
    wire = "".join(events).replace("\n", line_end).replace("ris", "ρις 🌧️").encode()
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(wire)), max_size=6)))

    async def pieces() -> AsyncIterator[bytes]:
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            yield wire[start:end]

    case = raw("case", "x", 2, via=Via.GENERATE_STREAM)
    answer = await answer_of(case, lambda _: httpx.Response(200, content=pieces()))
    assert (answer.complete, answer.text, answer.generated_tokens) == (True, " Paρις 🌧️.", 2)
    assert answer.route == Route(imported="hit")
