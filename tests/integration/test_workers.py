"""Several gateway processes on one port, before scripted shards and a real Redis: crash, reload, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import psutil
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.core.shard import ShardState, Watched
from orchestrator.deployment.gateway import bound_socket
from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.queues import ConductorQueue, Timings
from orchestrator.shards.fake import FakeShard, Gate, Part
from tgi_patches.contract import PROTOCOL_VERSION, Role, StatusReply

PATIENCE_S = 30.0
ANSWER = "The capital is Paris."
BODY = {"inputs": "Where?", "parameters": {"max_new_tokens": 20}}
FIRST_KEY, SECOND_KEY = "the-first-key-of-anna", "the-second-key-of-anna"


class Listening(uvicorn.Server):
    """A fake shard on a port of its own, in this event loop."""

    def __init__(self, shard: FakeShard) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        shard.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        super().__init__(uvicorn.Config(shard, log_config=None, access_log=False, lifespan="off"))
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def watched(shard: FakeShard) -> Watched:
    """As a conductor sees it."""
    view = shard.view()
    status = StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment="test",
        shard=view.shard,
        role=view.role,
        epoch=view.epoch,
        fingerprint=view.fingerprint,
        limits=view.limits,
        kv_tokens=view.kv_tokens,
        slots=view.slots,
        ring_bytes=view.ring_bytes,
        record_limit_bytes=view.record_limit_bytes,
        bytes_per_token=view.bytes_per_token,
    )
    return Watched(view.shard, view.role, view.url, ShardState.READY, status)


@asynccontextmanager
async def shards_in_redis() -> AsyncIterator[tuple[str, FakeShard]]:
    """A Redis whose table shows a pair of fake shards; the second one is the decode shard."""
    prefill, decode = FakeShard("p0", Role.PREFILL), FakeShard("d0", Role.DECODE)
    servers = [Listening(prefill), Listening(decode)]
    lasting = Timings(leader_ttl_s=120.0, shard_ttl_s=120.0)
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis())
        queue = await stack.enter_async_context(ConductorQueue(redis.url, "test", "c", timings=lasting))
        assert await queue.lead()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for server in servers:
            group.create_task(server.serve(sockets=[server.listener]))
            stack.callback(setattr, server, "should_exit", True)
        await queue.publish([watched(one) for one in (prefill, decode)])
        yield redis.url, decode


@dataclass
class Serving:
    """A `serve --workers 2` that runs."""

    url: str
    parent: psutil.Process
    decode: FakeShard

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.parent.children() if one.status() != psutil.STATUS_ZOMBIE]


@asynccontextmanager
async def serving(redis_url: str, decode: FakeShard, *more: str) -> AsyncIterator[Serving]:
    with bound_socket("127.0.0.1", 0) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        command = ("-m", "orchestrator.cli", "serve", "--fd", str(fd), "--redis", redis_url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "-d", "test", "--workers", "2", *more, pass_fds=(fd,)
        )
    try:
        made = Serving(f"http://127.0.0.1:{port}", psutil.Process(process.pid), decode)
        await until(lambda: len(made.workers()) == 2)
        yield made
        children = made.workers()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert not any(one.is_running() for one in children)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - another process, no event to wait for
            await asyncio.sleep(0.02)


async def connected(stack: AsyncExitStack, url: str) -> httpx.AsyncClient:
    """A client with one connection of its own, which a worker has taken that serves."""
    limits = httpx.Limits(max_connections=1)
    client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits)
    stack.push_async_callback(client.aclose)
    assert (await client.get("/health")).status_code == 200
    return client


async def pid_of(client: httpx.AsyncClient) -> int:
    """The worker behind a connection."""
    name: str = (await client.get("/admin/status")).json()["gateway"]
    return int(name.partition("-")[2].partition(".")[0])


async def one_each(stack: AsyncExitStack, made: Serving) -> list[httpx.AsyncClient]:
    """Two clients that are served by different workers, in the order of `workers()`."""
    by_pid: dict[int, httpx.AsyncClient] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(by_pid) < 2:
            client = await connected(stack, made.url)
            by_pid[await pid_of(client)] = client
    return [by_pid[one.pid] for one in made.workers()]


def counted(text: str) -> dict[str, float]:
    """Samples by name and labels, without gauges."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        if family.type != "gauge"
        for sample in family.samples
    }


async def scraped(client: httpx.AsyncClient, *, requests: int) -> str:
    """`/metrics` once it tells so many calls of `/generate`: those of other workers come a second late."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = (await client.get("/metrics")).text
            told = counted(text)["orchestrator_requests_total[('outcome', 'done'), ('route', 'generate')]"]
            assert told <= requests
            if told == requests:
                return text


def gauge(text: str, name: str) -> float:
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == name]
    return family.samples[0].value


async def text_streamed(client: httpx.AsyncClient) -> str:
    """The whole text of a stream, from its last event."""
    async with client.stream("POST", "/generate_stream", json=BODY) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data:")]
    told: str = orjson.loads(lines[-1][5:])["generated_text"]
    return told


async def test_a_killed_worker_takes_only_its_own_streams_and_no_count_with_it() -> None:
    async with AsyncExitStack() as stack:
        redis_url, decode = await stack.enter_async_context(shards_in_redis())
        made = await stack.enter_async_context(serving(redis_url, decode))
        first, second = await one_each(stack, made)
        for client in (first, second):
            answer = await client.post("/generate", json=BODY)
            assert answer.json()["generated_text"] == ANSWER
        for client in (first, second):
            before = await scraped(client, requests=2)
            assert gauge(before, "orchestrator_workers") == 2.0

        gate: Gate = decode.hold(Part.GET, 3)
        lost, kept = (asyncio.create_task(text_streamed(each)) for each in (first, second))
        await gate.reached.wait()
        await until(lambda: len(decode.generations(Part.GET)) == 4)
        killed, other = made.workers()
        killed.kill()
        with pytest.raises(httpx.TransportError):
            await lost
        await until(lambda: killed.pid not in {one.pid for one in made.workers()})
        told = (await (await connected(stack, made.url)).get("/metrics")).text
        gate.opened.set()
        assert await kept == ANSWER

        missing = counted(before).items() - counted(told).items()
        assert all(counted(told)[name] > value for name, value in missing)
        await until(lambda: len(made.workers()) == 2)
        assert other.pid in {one.pid for one in made.workers()}
        first, second = await one_each(stack, made)
        for client in (first, second):
            assert (await client.post("/generate", json=BODY)).status_code == 200
        for client in (first, second):
            after = await scraped(client, requests=4)
            assert gauge(after, "orchestrator_workers") == 2.0


async def test_a_hangup_lets_every_worker_read_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: {{anna: {FIRST_KEY}}}\n")
    keys.chmod(0o600)

    async def statuses(clients: list[httpx.AsyncClient], key: str) -> set[int]:
        headers = {"authorization": f"Bearer {key}"}
        answers = [await each.post("/generate", json=BODY, headers=headers) for each in clients]
        return {answer.status_code for answer in answers}

    async with AsyncExitStack() as stack:
        redis_url, decode = await stack.enter_async_context(shards_in_redis())
        made = await stack.enter_async_context(serving(redis_url, decode, "--keys-file", str(keys)))
        clients = await one_each(stack, made)
        assert await statuses(clients, FIRST_KEY) == {200}
        assert await statuses(clients, SECOND_KEY) == {401}
        keys.write_text(f"keys: {{anna: {SECOND_KEY}}}\n")
        os.kill(made.parent.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + PATIENCE_S
        while await statuses(clients, SECOND_KEY) != {200}:
            assert time.monotonic() < deadline_s
        assert await statuses(clients, FIRST_KEY) == {401}


async def test_settings_that_every_worker_would_refuse_end_the_parent_in_one_sentence(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator.cli", "serve", "--redis", "unix:///nowhere", "--workers", "2"),
        *("--keys-file", str(tmp_path / "none.yaml"), "--listen", "127.0.0.1:0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    sentence = f"The keys file {tmp_path / 'none.yaml'} cannot be read: No such file or directory."
    assert (process.returncode, said.decode().strip()) == (2, sentence)
