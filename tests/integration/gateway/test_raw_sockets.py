"""HTTP as it may come: in single bytes, pipelined, chunked, old, broken; both sides are bare sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from orchestrator.core.ticket import Outcome
from orchestrator.shards.fake import Part

from .conftest import LIMITS
from .raw import (
    END,
    GENERATE,
    REQUESTS,
    Line,
    OpenHouse,
    chunked,
    dripping,
    head_of,
    line_to,
    open_house,
    request_of,
    until,
)

WHOLE = [kind for kind in REQUESTS if not kind.endswith("_stream")]


@pytest.fixture
async def house() -> AsyncIterator[OpenHouse]:
    async with open_house() as built:
        yield built


@pytest.fixture
async def line(house: OpenHouse) -> AsyncIterator[Line]:
    made = await line_to(house)
    yield made
    await made.leave()


async def answers(line: Line) -> dict[str, bytes]:
    """To every kind of request, one after the other on one connection."""
    bodies = {}
    for kind in REQUESTS:
        await line.send(request_of(kind))
        answer = await line.answer()
        assert answer.status == 200, kind
        assert answer.headers["x-orchestrator-route"] == "separated", kind
        bodies[kind] = answer.body
    return bodies


# --- pieces -------------------------------------------------------------------------------------


async def test_answers_of_shards_in_single_bytes_are_the_same(house: OpenHouse, line: Line) -> None:
    expected = await answers(line)
    async with dripping(house.prefill.url) as prefill, dripping(house.decode.url) as decode:
        house.prefill.url, house.decode.url = prefill, decode
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        assert await answers(line) == expected
    assert expected["generate_stream"].count(b"data:") == 5
    assert expected["chat_stream"].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["generate_stream", "chat"])
async def test_a_request_in_single_bytes_is_the_same(house: OpenHouse, line: Line, kind: str) -> None:
    await line.send(request_of(kind))
    expected = await line.answer()
    await line.drip(request_of(kind))
    answer = await line.answer()
    assert (answer.status, answer.body) == (200, expected.body)


async def test_the_first_events_leave_before_the_shard_has_written_the_last(house: OpenHouse) -> None:
    """In single bytes too: what is complete goes on at once."""
    gate = house.decode.hold(Part.GET, 3)
    async with dripping(house.prefill.url) as prefill, dripping(house.decode.url) as decode:
        house.prefill.url, house.decode.url = prefill, decode
        house.queue.set_shards([house.prefill.view(), house.decode.view()])
        line = await line_to(house)
        await line.send(request_of("generate_stream"))
        seen = await line.until(b'"index":3,')
        assert gate.reached.is_set() or seen.count(b"data:") == 3
        gate.opened.set()
        assert b'"index":5' in await line.until(b"0\r\n\r\n")
        await line.leave()


# --- connections --------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_their_order(house: OpenHouse, line: Line) -> None:
    kinds = [*REQUESTS] * 3
    await line.send(b"".join(request_of(kind, f"x-request-id: r{i}") for i, kind in enumerate(kinds)))
    got = [await line.answer() for _ in kinds]
    assert [one.headers["x-request-id"] for one in got] == [f"r{i}" for i in range(len(kinds))]
    assert {one.status for one in got} == {200}
    assert got[2].body == got[9].body == got[16].body
    for _ in kinds:
        await house.settled()
    assert house.reserved == (0, 0, 0)
    assert house.nothing_open()


async def test_a_connection_serves_on_after_answers_errors_and_other_routes(
    house: OpenHouse, line: Line
) -> None:
    bad = b'{"inputs": 3}'
    for _ in range(20):
        await line.send(request_of("chat_stream") + head_of("/health", method="GET"))
        assert (await line.answer()).status == 200
        assert (await line.answer()).status == 200
        await line.send(head_of("/generate", f"content-length: {len(bad)}") + bad)
        assert (await line.answer()).status == 422
        await line.send(head_of("/nowhere", f"content-length: {len(bad)}") + bad)
        assert (await line.answer()).status == 404
    assert len(house.server.server_state.connections) == 1
    assert house.pool.connections == 2


async def test_a_client_that_asks_for_it_is_hung_up_on_after_its_answer(house: OpenHouse) -> None:
    for kind in REQUESTS:
        line = await line_to(house)
        await line.send(request_of(kind, "connection: close"))
        answer = await line.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close"), kind
        assert await line.ended() == b"", kind
        await line.leave()


async def test_http_1_0_gets_a_length_and_the_end_of_the_connection(house: OpenHouse) -> None:
    for kind in WHOLE:
        line = await line_to(house)
        await line.send(request_of(kind, version="1.0"))
        head, _, body = (await line.ended()).partition(END)
        assert head.startswith(b"HTTP/1.1 200"), kind
        assert b"connection: close" in head, kind
        assert b"content-length: %d" % len(body) in head, kind
        assert b"transfer-encoding" not in head, kind
        await line.leave()


async def test_an_offer_of_another_protocol_is_passed_over(house: OpenHouse, line: Line) -> None:
    """Java's HttpClient and `curl --http2` offer h2c with every first request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    usual = request_of("chat", *offer)
    shouted = request_of("chat", *offer[:1], "UPGRADE: h2c")
    for sent, cut in ((usual, len(usual)), (shouted, 200), (usual, usual.index(END)), (usual, -3)):
        await line.send(sent[:cut])
        await asyncio.sleep(0)
        await line.send(sent[cut:] + request_of("generate_stream"))
        answer = await line.answer()
        assert (answer.status, answer.json()["model"]) == (200, "my/name")
        assert (await line.answer()).status == 200


# --- bodies -------------------------------------------------------------------------------------


async def test_a_body_in_chunks_is_read_whole(house: OpenHouse, line: Line) -> None:
    body = json.dumps(GENERATE).encode()
    for sizes in ([], [1, 2, 3], [1] * 1000):
        await line.send(head_of("/generate", "transfer-encoding: chunked") + chunked(body, sizes))
        assert (await line.answer()).json()["generated_text"] == "The capital is Paris."


async def test_a_body_that_says_no_length_is_refused_where_it_passes_the_limit(
    house: OpenHouse, line: Line
) -> None:
    await line.send(head_of("/generate", "transfer-encoding: chunked"))
    for _ in range(3):
        await line.send(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
    await line.send(b"6a0\r\n" + b" " * 0x6A0 + b"\r\n")
    # 100,000 bytes so far: exactly the limit.
    await asyncio.sleep(0)
    await line.send(b"1\r\n \r\n")
    answer = await line.answer()
    assert (answer.status, answer.json()["error_type"]) == (413, "validation")
    assert await line.ended() == b""
    assert house.queue.tickets == []


async def test_the_gateways_own_body_limit_holds_where_its_shards_would_take_more() -> None:
    async with open_house(limits=replace(LIMITS, payload_bytes=1000)) as house:
        body = json.dumps(GENERATE).encode()
        line = await line_to(house)
        await line.send(head_of("/generate", "content-length: 1000") + body.ljust(1000))
        assert (await line.answer()).status == 200
        await line.send(head_of("/generate", "content-length: 1001") + body.ljust(1001))
        assert (await line.answer()).status == 413
        await line.leave()


async def test_who_waits_for_100_continue_is_told_to_go_on(house: OpenHouse, line: Line) -> None:
    head, _, body = request_of("generate", "expect: 100-continue").partition(END)
    await line.send(head + END)
    assert await line.until(END) == b"HTTP/1.1 100 Continue\r\n\r\n"
    await line.send(body)
    assert (await line.answer()).status == 200


async def test_who_waits_with_too_large_a_body_is_refused_without_sending_it(
    house: OpenHouse, line: Line
) -> None:
    await line.send(head_of("/generate", "content-length: 100001", "expect: 100-continue"))
    assert (await line.answer()).status == 413
    assert await line.ended() == b""


# --- what is no HTTP ----------------------------------------------------------------------------

GARBAGE = {
    "binary": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "no method": b" / HTTP/1.1\r\n\r\n",
    "header without colon": b"GET / HTTP/1.1\r\nnonsense\r\n\r\n",
    "two lengths": head_of("/generate", "content-length: 3", "content-length: 4") + b"abcd",
    "length and chunks": head_of("/generate", "content-length: 3", "transfer-encoding: chunked")
    + b"0\r\n\r\n",
    "length that is none": head_of("/generate", "content-length: -1"),
    "chunk that is none": head_of("/generate", "transfer-encoding: chunked") + b"zz\r\n",
    "tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "path beyond ASCII": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
}


async def test_garbage_is_a_400_and_costs_nobody_else_anything(house: OpenHouse, line: Line) -> None:
    for what, sent in GARBAGE.items():
        broken = await line_to(house)
        await broken.send(sent)
        assert (await broken.ended()).startswith(b"HTTP/1.1 400 "), what
        await broken.leave()
    await until(lambda: len(house.server.server_state.connections) == 1)
    assert house.queue.tickets == []
    await line.send(request_of("chat"))
    assert (await line.answer()).status == 200


async def test_a_head_without_end_is_a_400(house: OpenHouse) -> None:
    for endless in (head_of("/generate")[:-2] + b"x: ", head_of("/generate")[:-2], b"GET /"):
        line = await line_to(house)
        line.writer.write(endless + b"y" * 32_000)
        await line.writer.drain()
        await asyncio.sleep(0)
        line.writer.write(b"y" * 40_000)
        assert (await line.ended()).startswith(b"HTTP/1.1 400 ")
        await line.leave()
    await until(lambda: not house.server.server_state.connections)


async def test_a_body_that_comes_with_its_head_does_not_count_as_head(house: OpenHouse, line: Line) -> None:
    body = json.dumps(GENERATE).encode() + b" " * 90_000
    await line.send(head_of("/generate", f"content-length: {len(body)}") + body)
    assert (await line.answer()).status == 200


async def test_garbage_behind_a_request_ends_that_request(house: OpenHouse, line: Line) -> None:
    gate = house.decode.hold(Part.GET, 2)
    await line.send(request_of("generate_stream"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    await line.send(b"\x00garbage\r\n\r\n")
    await line.ended()
    await house.settled()
    assert [completion.outcome for completion in house.queue.completed] == [Outcome.CANCELLED]
    assert house.reserved == (0, 0, 0)
    assert house.nothing_open()
