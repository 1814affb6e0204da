"""The gateway benchmark notices every broken answer, and its figures are what they are called."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from typer.testing import CliRunner

from orchestrator.bench.gateway import proc
from orchestrator.bench.gateway.load import LoadFailed, clients, each_asks
from orchestrator.bench.gateway.measure import Crowd, Window, added, percentiles
from orchestrator.bench.gateway.mock import Connection, Shard
from orchestrator.bench.gateway.peers.legs import get_body, put_body
from orchestrator.bench.gateway.peers.vllm_router import COMMAND_VARIABLE
from orchestrator.bench.gateway.subjects import choose
from orchestrator.bench.gateway.targets import TARGETS, judge
from orchestrator.bench.gateway.wire import Ask, Route, flaw
from orchestrator.cli import app
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role

CHAT = b'data: {"model":"bench","choices":[{"delta":{"content":" t%d"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
LIMIT_S = 5.0


def chat(*tokens: int) -> bytes:
    return b"".join(CHAT % token for token in tokens)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (chat(0, 1, 2) + DONE, ""),
        (chat(0, 2) + DONE, "2 tokens"),
        (chat(0, 1, 1) + DONE, "not in order"),
        (chat(0, 2, 1) + DONE, "not in order"),
        (chat(0, 1, 2, 3) + DONE, "4 tokens"),
        (chat(0, 1, 2) + DONE + DONE, r"no \[DONE\]"),
        (chat(0, 1, 2), r"no \[DONE\]"),
        ((chat(0, 1, 2) + DONE).replace(b"bench", b"|kv1:get", 1), "another model name"),
    ],
)
def test_a_stream_that_is_not_whole_has_a_flaw(body: bytes, says: str) -> None:
    found = flaw(Ask(Route.CHAT, True, 3), body)
    assert re.fullmatch(f".*{says}.*" if says else "", found)


def test_a_whole_answer_has_every_token_once() -> None:
    ask = Ask(Route.GENERATE, False, 3)
    assert flaw(ask, b'{"generated_text":" t0 t1 t2"}') == ""
    assert flaw(ask, b'{"generated_text":" t0 t2"}')
    assert flaw(ask, b'{"error":"overloaded"}')


@asynccontextmanager
async def served(make: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def shard(role: Role = Role.DECODE) -> AsyncIterator[int]:
    async with served(partial(Connection, Shard(role, 1))) as port:
        yield port


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pace_us", [0, 500])
async def test_the_load_finds_every_answer_of_the_mock_whole(
    route: Route, stream: bool, pace_us: int
) -> None:
    async with shard() as port, clients(port, 3) as asking:
        answers = await each_asks(asking, Ask(route, stream, 7, pace_us), LIMIT_S, times=2)
    assert [answer.events for answer in answers] == [7 if stream else 0] * 6
    assert all(0 < answer.first_s <= answer.took_s for answer in answers)


class Rewriting(asyncio.Protocol):
    """Gives one stream with a token too few."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        body = chat(0, 1) + DONE
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def test_a_gateway_that_loses_a_token_has_no_figures() -> None:
    async with served(Rewriting) as port, clients(port, 1) as asking:
        with pytest.raises(LoadFailed, match="2 tokens"):
            await each_asks(asking, Ask(Route.CHAT, True, 3), LIMIT_S)


async def test_a_port_where_nobody_listens_is_one_sentence() -> None:
    async with shard() as port:
        pass
    with pytest.raises(LoadFailed, match=f"127.0.0.1:{port} does not accept connections"):
        async with clients(port, 2):
            pass


def test_the_window_is_from_the_last_to_start_to_the_first_to_end() -> None:
    clock = iter([1.0, 1.5])
    first, second = object(), object()
    window = Window(2, low=10, high=90, cpu_s=lambda: next(clock))
    for client, events in ((first, 30), (second, 9), (second, 10), (first, 60), (first, 90), (second, 70)):
        window.seen(client, events)  # type: ignore[arg-type]
    # Begun at 30 + 10 events with 1.0 s, over at 90 + 10 with 1.5 s.
    assert window.figures == (0.5, 60)


def test_streams_that_ended_are_not_open() -> None:
    crowd = Crowd(tokens=5, rss_bytes=lambda: 7)
    crowd.SAMPLE_EVERY = 2
    for client, events in ((1, 1), (2, 2), (1, 5), (3, 1)):
        crowd.seen(client, events)  # type: ignore[arg-type]
    assert (crowd.most_open, crowd.most_bytes) == (2, 7)


def test_what_a_gateway_adds_is_the_difference_of_percentiles() -> None:
    direct = percentiles([0.001] * 100)
    assert direct == {"ttft_p50_ms": 1.0, "ttft_p99_ms": 1.0}
    through = added([0.003] * 98 + [0.009, 0.011], direct)
    assert through["added_ttft_p50_ms"] == pytest.approx(2.0)
    assert through["added_ttft_p99_ms"] == pytest.approx(10.0)


def test_targets_are_ratios_to_the_peer_of_the_same_run() -> None:
    medians = {
        "ours": {"event_us": 12.0, "busy_256_us": 150.0, "busy_1_us": 100.0, "rss_per_stream_kb": 39.0},
        "nginx": {"event_us": 10.0},
        "vllm-router": {"event_us": 10.0},
    }
    found = [(one.target.figure, one.target.peer, one.value, one.met) for one in judge(medians)]
    assert ("event_us", "vllm-router", 1.2, False) in found
    assert ("event_us", "nginx", 1.2, True) in found
    assert ("event_us", "fastapi", None, None) in found
    assert ("busy_256_us", "", 1.5, False) in found
    assert ("rss_per_stream_kb", "", 39.0, True) in found
    assert len(found) == len(TARGETS)


def test_the_kernel_counts_cpu_time_as_the_process_itself_does() -> None:
    before_s = time.process_time()
    counted_s = proc.cpu_s([os.getpid()])
    assert before_s <= counted_s <= time.process_time()


def test_this_process_is_pinned_only_inside_the_block() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with proc.pinned(core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


def test_the_put_leg_asks_for_one_token_and_the_get_leg_names_its_kv() -> None:
    body = {"model": "bench", "max_tokens": 9, "stream": True}
    put = put_body(body)
    assert (put["max_tokens"], put["stream"]) == (1, False)
    assert get_body(body, {"kv_transfer_params": {"x": 1}}) == body | {"kv_transfer_params": {"x": 1}}
    assert get_body(body, {}) == body
    tgi = {"inputs": "x", "parameters": {"max_new_tokens": 9, "seed": 3}}
    assert put_body(tgi) == {"inputs": "x", "parameters": {"max_new_tokens": 1, "seed": 3}}


def test_a_peer_that_is_missing_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "no-such-command")
    chosen = choose(["vllm-router", "ours"])
    assert list(chosen.versions) == ["ours"]
    assert "pip install vllm-router==0.1.17" in chosen.missing["vllm-router"]


def test_a_gateway_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="There is no gateway 'apache'"):
        choose(["apache"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--only", "apache"], "There is no gateway 'apache'"),
        (["--measure", "speed"], "There is no measure 'speed'"),
        (["--route", "grpc"], "--route must be chat, completions, generate, not 'grpc'."),
    ],
)
def test_a_bad_flag_is_one_sentence(flags: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", "gateway", *flags])
    assert done.exit_code == 2
    assert sentence in done.output
