"""TGI's router through its sidecar's eyes, with a router on a socket that answers what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tgi_patches.contract import Limits
from tgi_patches.sidecar.describe import RouterView
from tgi_patches.sidecar.router import Router, RouterFault, gauges, limits_from

ORDERED = Limits(90, 100, 8)
INFO = {
    "model_id": "m",
    "max_concurrent_requests": 160,
    "max_best_of": 3,
    "max_stop_sequences": 5,
    "max_input_tokens": 80,
    "max_total_tokens": 95,
    "max_client_batch_size": 6,
}
METRICS = b"""# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 480
tgi_request_duration_bucket{le="0.1"} 4
"""
TOLD = Limits(80, 95, 8, max_best_of=3, max_stop_sequences=5, max_client_batch_size=6)


class FakeRouter:
    """Status and body by path; a path without an answer is silent."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {
            "/health": (200, b""),
            "/info": (200, json.dumps(INFO).encode()),
            "/metrics": (200, METRICS),
        }
        self.asked: list[str] = []
        self.port = 0
        self.third_round = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        self.asked.append(path)
        if self.asked.count("/metrics") == 3:
            self.third_round.set()
        if path in self.answers:
            status, body = self.answers[path]
            writer.write(b"HTTP/1.0 %d Whatever\r\nX: y\r\n\r\n" % status + body)
            await writer.drain()
            writer.close()
        else:
            await reader.read()
            writer.close()


@pytest.fixture
async def fake() -> AsyncIterator[FakeRouter]:
    made = FakeRouter()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(fake: FakeRouter, clock: Clock) -> Router:
    return Router("127.0.0.1", fake.port, ORDERED, deadline_s=0.2, silence_s=60.0, clock=clock)


async def test_before_it_was_asked_nothing_is_known() -> None:
    view = Router("127.0.0.1", 1, ORDERED).view
    assert view == RouterView("TGI's router has not answered yet.")


async def test_a_router_that_serves(router: Router) -> None:
    await router.ask()
    assert router.view == RouterView("", TOLD, running=12, waiting=3, kv_tokens_used=480)


async def test_limits_are_asked_for_once_in_a_router_s_life(fake: FakeRouter, router: Router) -> None:
    await router.ask()
    await router.ask()
    assert fake.asked.count("/info") == 1
    fake.answers["/metrics"] = (500, b"")
    await router.ask()
    fake.answers["/metrics"] = (200, METRICS)
    fake.answers["/info"] = (200, json.dumps(INFO | {"max_input_tokens": 70}).encode())
    await router.ask()
    assert router.view.limits == Limits(70, 95, 8, 5, 5, 3, 6)


async def test_a_router_that_is_not_there_is_a_sentence() -> None:
    router = Router("127.0.0.1", 1, ORDERED)
    await router.ask()
    assert router.view.fault.startswith("TGI's router does not answer /info: ")
    assert (router.view.limits, router.view.running) == (None, 0)


async def test_a_router_that_fell_ill_says_so_and_its_numbers_are_gone(
    fake: FakeRouter, router: Router
) -> None:
    await router.ask()
    fake.answers["/health"] = (503, b'{"error": "unhealthy"}')
    await router.ask()
    assert router.view == RouterView("TGI's router answers /health with status 503.")


async def test_a_long_prefill_holds_health_up_and_is_no_fault(
    fake: FakeRouter, router: Router, clock: Clock
) -> None:
    await router.ask()
    del fake.answers["/health"]
    clock.now_s += 59.0
    await router.ask()
    assert router.view.fault == ""
    clock.now_s += 1.0
    await router.ask()
    assert router.view.fault == "TGI's server has not answered for 60 s."
    assert router.view.running == 12
    fake.answers["/health"] = (200, b"")
    await router.ask()
    assert router.view.fault == ""


async def test_silence_from_the_start_is_a_fault(fake: FakeRouter, router: Router, clock: Clock) -> None:
    del fake.answers["/health"]
    await router.ask()
    assert router.view.fault == "TGI's server has not answered for 60 s."


async def test_a_router_that_is_silent_about_itself_is_a_fault(fake: FakeRouter, router: Router) -> None:
    del fake.answers["/info"]
    await router.ask()
    assert router.view.fault == "TGI's router did not answer /info within 0.2 s."


async def test_what_is_no_http_is_a_fault(fake: FakeRouter, router: Router) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0\r\n")
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        stranger = Router("127.0.0.1", server.sockets[0].getsockname()[1], ORDERED)
        await stranger.ask()
    assert stranger.view.fault == "TGI's router does not answer /info: that is no HTTP."


async def test_it_is_asked_again_and_again_until_nobody_wants_to_know(fake: FakeRouter, clock: Clock) -> None:
    router = Router("127.0.0.1", fake.port, ORDERED, ask_every_s=0.0, clock=clock)
    watching = asyncio.create_task(router.watch())
    await asyncio.wait_for(fake.third_round.wait(), 10.0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (METRICS, {"running": 12, "waiting": 3, "kv_tokens_used": 480}),
        (b"", {}),
        (b"tgi_batch_current_size 2.0\n", {"running": 2}),
        (b'tgi_queue_size{model="a b"} 7\n', {"waiting": 7}),
        (b"xtgi_queue_size 7\ntgi_queue_size_more 8\ntgi_queue_size NaN\n", {}),
        (b"\xff\xfe tgi\ntgi_queue_size 1", {"waiting": 1}),
    ],
)
def test_three_gauges_are_read_and_no_other(text: bytes, expected: dict[str, int]) -> None:
    assert gauges(text) == expected


def test_an_older_router_s_missing_limits_stay_as_ordered() -> None:
    assert limits_from(b'{"max_input_tokens": 80, "max_total_tokens": null}', ORDERED) == Limits(80, 100, 8)


@pytest.mark.parametrize("info", [b"[]", b"no", b"\xff"])
def test_an_info_that_is_none_is_a_fault(info: bytes) -> None:
    with pytest.raises(RouterFault, match="/info with something that is no"):
        limits_from(info, ORDERED)
