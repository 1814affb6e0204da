"""Clients that take their time: with a head, with a body, with reading.  None holds anything for ever."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.ticket import Outcome

from .raw import FloodingShard, head_of, line_to, open_house, request_of, until


async def test_a_body_that_does_not_come_is_answered_408_and_frees_its_connection() -> None:
    async with open_house(body_timeout_s=0.2) as house:
        for path in ("/generate", "/tokenize"):
            line = await line_to(house)
            await line.send(head_of(path, "content-length: 100") + b"{")
            answer = await line.answer()
            assert answer.status == 408
            assert answer.json() == {
                "error": "The request's body did not come within 0.2 s.",
                "error_type": "validation",
            }
            assert await line.ended() == b""
        assert house.queue.tickets == []
        await until(lambda: not house.server.server_state.connections)


async def test_a_body_in_pieces_within_its_time_is_served() -> None:
    async with open_house(body_timeout_s=10.0) as house:
        line = await line_to(house)
        await line.drip(request_of("generate"))
        assert (await line.answer()).status == 200


async def test_half_a_head_and_a_silent_connection_are_closed() -> None:
    async with open_house(head_timeout_s=0.2) as house:
        half, silent, again = [await line_to(house) for _ in range(3)]
        await half.send(b"POST /generate HTTP/1.1\r\nhost: x")
        await again.send(request_of("generate"))
        assert (await again.answer()).status == 200
        await again.send(b"POST ")
        for line in (half, silent, again):
            assert await line.ended() == b""
        await until(lambda: not house.server.server_state.connections)


async def test_an_idle_connection_between_requests_is_not_late_with_its_head() -> None:
    async with open_house(head_timeout_s=0.2) as house:
        line = await line_to(house)
        for _ in range(2):
            await line.send(request_of("generate"))
            assert (await line.answer()).status == 200
            assert not await line.closes_within(0.5)


async def test_a_client_that_does_not_read_loses_its_connection_with_its_request() -> None:
    flood = FloodingShard(events=2000, size=16_000)
    async with open_house(request_timeout_s=1.5) as house, flood.listening():
        house.queue.set_shards([replace(house.decode.view(), shard="flood-0", url=flood.url)])
        line = await line_to(house, receive_bytes=65_536)
        await line.send(request_of("generate_stream"))
        await until(lambda: bool(house.queue.completed))
        assert house.queue.completed[0].outcome is Outcome.FAILED
        await until(lambda: not house.server.server_state.connections)
