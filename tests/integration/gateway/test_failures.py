"""Shards that die, stop, hang or talk nonsense: a clear error, and everything given back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.core.ticket import Outcome
from orchestrator.shards.client import Deadlines
from orchestrator.shards.fake import FIRST_ID, Fault, Part

GENERATE = {"inputs": "Hello", "parameters": {"max_new_tokens": 20, "details": True}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
REQUESTS = {
    "generate": ("/generate", GENERATE),
    "generate_stream": ("/generate_stream", GENERATE),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", CHAT | {"stream": True}),
}
STREAMS = ("generate_stream", "chat_stream")


@pytest.fixture
def payloads_of(payloads_of: Any) -> Any:
    """Without the `[DONE]` that stands behind an error on the OpenAI routes, as in TGI."""

    def read(body: bytes) -> list[Any]:
        payloads: list[Any] = payloads_of(body)
        failed = len(payloads) > 1 and payloads[-1] == "[DONE]" and "error" in payloads[-2]
        return payloads[:-1] if failed else payloads

    return read


async def send(house: Any, kind: str) -> Any:
    path, body = REQUESTS[kind]
    return await house.http.post(path, json=body)


async def all_given_back(house: Any, outcome: Outcome) -> None:
    await house.settled()
    assert [completion.outcome for completion in house.queue.completed] == [outcome]
    assert house.queue.cancelled == []
    assert house.reserved == (0, 0, 0)
    await house.quiet()


def error_of(payload: dict[str, Any]) -> str:
    error = payload["error"]
    return error["message"] if isinstance(error, dict) else error


@asynccontextmanager
async def slamming_door() -> AsyncIterator[str]:
    """The URL of a server that resets every connection."""

    async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    server = await asyncio.start_server(slam, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("where", ["refused", "reset"])
async def test_prefill_shard_that_is_gone_is_a_502(house: Any, kind: str, where: str) -> None:
    async with slamming_door() as url:
        house.prefill.url = url if where == "reset" else "http://127.0.0.1:9"
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        response = await send(house, kind)
    assert response.status_code == 502
    assert response.json()["error_type"] == "generation"
    assert "prefill-0" in response.json()["error"]
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_prefill_shard_that_dies_before_the_first_token_is_a_502(house: Any, kind: str) -> None:
    house.prefill.fail(Part.PUT, 0, Fault.DIE)
    response = await send(house, kind)
    assert response.status_code == 502
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", STREAMS)
async def test_stream_without_a_token_is_a_502_never_an_empty_200(house: Any, kind: str) -> None:
    house.prefill.fail(Part.PUT, 0, Fault.STOP)
    response = await send(house, kind)
    assert response.status_code == 502
    assert response.json()["error"] == "Shard prefill-0 stopped before the answer was complete."
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("token", [0, 2])
async def test_mixed_stream_that_stops_too_early(house: Any, payloads_of: Any, kind: str, token: int) -> None:
    house.queue.set_shards([house.decode.view()])
    house.decode.fail(Part.PLAIN, token, Fault.STOP)
    response = await send(house, kind)
    if token == 0:
        assert response.status_code == 502
    else:
        payloads = payloads_of(response.content)
        assert len(payloads) == token + 1
        assert error_of(payloads[-1]) == "Shard decode-1 stopped before the answer was complete."
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_decode_shard_that_dies_under_a_whole_answer_is_a_502(house: Any, kind: str) -> None:
    house.decode.fail(Part.GET, 3, Fault.DIE)
    response = await send(house, kind)
    assert response.status_code == 502
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize("fault", [Fault.DIE, Fault.STOP])
async def test_stream_that_breaks_ends_with_an_error_event(
    house: Any, payloads_of: Any, kind: str, token: int, fault: Fault
) -> None:
    house.decode.fail(Part.GET, token, fault)
    response = await send(house, kind)
    payloads = payloads_of(response.content)
    assert response.status_code == 200
    # The first token came from the prefill shard, those before the fault from the decode shard.
    assert len(payloads) == max(1, token) + 1
    assert "decode-1" in error_of(payloads[-1])
    assert payloads[-1]["error_type"] == "generation"
    await all_given_back(house, Outcome.FAILED)


async def test_error_event_has_tgis_shape_on_each_route(house: Any, payloads_of: Any) -> None:
    house.decode.fail(Part.GET, 2, Fault.STOP)
    tgi = payloads_of((await send(house, "generate_stream")).content)[-1]
    chat_stream = (await send(house, "chat_stream")).content
    assert chat_stream.endswith(b"}\n\ndata: [DONE]\n\n")
    chat = payloads_of(chat_stream)[-1]
    sentence = "Shard decode-1 stopped before the answer was complete."
    assert tgi == {"error": sentence, "error_type": "generation"}
    assert chat == {"error": {"message": sentence, "http_status_code": 502}, "error_type": "generation"}


@pytest.mark.parametrize("kind", STREAMS)
async def test_error_event_of_a_shard_is_passed_on(house: Any, payloads_of: Any, kind: str) -> None:
    house.decode.fail(Part.GET, 2, Fault.ERROR_EVENT)
    payloads = payloads_of((await send(house, kind)).content)
    assert error_of(payloads[-1]) == "Request failed during generation: out of memory"
    assert payloads[-1]["error_type"] == "generation"
    assert len(payloads) == 3


@pytest.mark.parametrize("kind", STREAMS)
async def test_error_event_before_the_first_token_is_a_status(house: Any, kind: str) -> None:
    house.prefill.fail(Part.PUT, 0, Fault.ERROR_EVENT)
    response = await send(house, kind)
    assert response.status_code == 424
    assert response.json()["error"] == "Request failed during generation: out of memory"
    await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("part", [Part.PUT, Part.GET])
async def test_nonsense_from_a_shard_is_an_error(house: Any, payloads_of: Any, kind: str, part: Part) -> None:
    shard = house.prefill if part is Part.PUT else house.decode
    shard.fail(part, 0, Fault.GARBAGE)
    response = await send(house, kind)
    if part is Part.PUT:
        assert response.status_code == 502
    else:
        assert shard.shard in error_of(payloads_of(response.content)[-1])
    await all_given_back(house, Outcome.FAILED)


async def test_another_first_word_in_a_chat_is_an_error_never_a_garbled_answer(
    house: Any, payloads_of: Any
) -> None:
    house.prefill.tokens = ("Yes", " it", " is")
    house.decode.tokens = ("No", " way", ".")
    first, error = payloads_of((await send(house, "chat_stream")).content)
    assert first["choices"][0]["delta"]["content"] == "Yes"
    assert error_of(error) == "Shard decode-1 went on from another first token."
    await all_given_back(house, Outcome.FAILED)


async def test_another_first_token_id_is_an_error(house: Any, payloads_of: Any) -> None:
    house.decode.first_id = FIRST_ID + 50
    first, error = payloads_of((await send(house, "generate_stream")).content)
    assert first["token"]["id"] == FIRST_ID
    assert error == {"error": "Shard decode-1 went on from another first token.", "error_type": "generation"}
    await all_given_back(house, Outcome.FAILED)


async def test_prefill_shard_that_dies_after_its_token_does_not_stop_the_answer(
    house: Any, payloads_of: Any
) -> None:
    gate = house.prefill.hold(Part.PUT, 0)
    request = asyncio.create_task(send(house, "generate_stream"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    house.prefill.refuses_wait = True
    gate.opened.set()
    payloads = payloads_of((await request).content)
    assert [payload["token"]["id"] for payload in payloads] == [FIRST_ID + i for i in range(5)]
    await all_given_back(house, Outcome.DONE)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_shard_that_hangs_before_the_first_byte_is_a_504(house_of: Any, kind: str) -> None:
    async with house_of(deadlines=Deadlines(first_event_s=0.2), request_timeout_s=0.5) as house:
        house.prefill.hold(Part.PUT, 0)
        response = await send(house, kind)
        assert response.status_code == 504
        await all_given_back(house, Outcome.FAILED)
        assert house.prefill.left.is_set()


@pytest.mark.parametrize("kind", STREAMS)
async def test_shard_that_hangs_in_a_stream_ends_it_with_an_error_event(
    house_of: Any, payloads_of: Any, kind: str
) -> None:
    async with house_of(deadlines=Deadlines(idle_s=0.2)) as house:
        house.decode.hold(Part.GET, 2)
        payloads = payloads_of((await send(house, kind)).content)
        assert error_of(payloads[-1]) == "Shard decode-1 did not answer in time."
        assert len(payloads) == 3
        await all_given_back(house, Outcome.FAILED)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_deadline_of_the_request_ends_it_whatever_the_shard_does(
    house_of: Any, payloads_of: Any, kind: str
) -> None:
    # Long enough that the first token is there before it, also on a machine that stumbles.
    async with house_of(request_timeout_s=1.5) as house:
        house.decode.hold(Part.GET, 2)
        response = await send(house, kind)
        if kind in STREAMS:
            assert "longer than the gateway allows" in error_of(payloads_of(response.content)[-1])
        else:
            assert response.status_code == 504
        await all_given_back(house, Outcome.FAILED)
        assert house.decode.left.is_set()


async def test_silence_in_a_stream_is_filled_with_comments(house_of: Any, events_of: Any) -> None:
    async with house_of(keep_alive_s=0.02) as house:
        gate = house.decode.hold(Part.GET, 2)
        received = b""
        path, body = REQUESTS["generate_stream"]
        async with house.http.stream("POST", path, json=body) as response:
            async for piece in response.aiter_raw():
                received += piece
                if received.count(b":\n\n") >= 3:
                    gate.opened.set()
        events = events_of(received)
        comments = [event.raw for event in events if event.data is None]
        assert len(comments) >= 3
        assert set(comments) == {b":\n\n"}
        assert len(events) - len(comments) == 5


async def test_a_stream_that_is_not_silent_gets_no_comments(house_of: Any, events_of: Any) -> None:
    async with house_of(keep_alive_s=0.2) as house:
        house.decode.tokens = house.prefill.tokens = tuple("x" * 30)
        gates = [house.decode.hold(Part.GET, token) for token in range(1, 30)]
        received = b""
        body = GENERATE | {"parameters": {"max_new_tokens": 30}}
        async with house.http.stream("POST", "/generate_stream", json=body) as response:
            opening = asyncio.create_task(open_one_by_one(gates, 0.03))
            async for piece in response.aiter_raw():
                received += piece
            await opening
        events = events_of(received)
        # Thirty tokens over 0.9 s: four periods, none of them silent.
        assert len(events) == 30
        assert all(event.data is not None for event in events)


async def open_one_by_one(gates: list[Any], pause_s: float) -> None:
    for gate in gates:
        await asyncio.sleep(pause_s)
        gate.opened.set()


async def test_queue_that_does_not_answer_the_end_does_not_hold_the_client(house: Any) -> None:
    never = asyncio.get_running_loop().create_future()
    house.queue.complete = lambda _: never
    response = await send(house, "generate")
    assert response.status_code == 200


async def test_next_request_works_after_a_failure(house: Any, payloads_of: Any) -> None:
    house.decode.fail(Part.GET, 1, Fault.DIE)
    await send(house, "generate_stream")
    house.decode.heal()
    payloads = payloads_of((await send(house, "generate_stream")).content)
    assert len(payloads) == 5
    await house.settled()
    await house.settled()
    outcomes = [completion.outcome for completion in house.queue.completed]
    assert outcomes == [Outcome.FAILED, Outcome.DONE]
    assert house.reserved == (0, 0, 0)
