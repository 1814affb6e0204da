"""A deployment of the tiny model that loses a gateway worker, or its Redis, while it answers."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from .conftest import CommandLine, family
from .test_up import LIMIT_S, STORY, process_of, until

pytestmark = pytest.mark.e2e

STREAMS = 8
TOKENS = 24
REQUEST_TIMEOUT_S = 20


@pytest.fixture
def started(cli: CommandLine) -> dict[str, Any]:
    """A detached deployment of one prefill and one decode shard behind two gateway workers."""
    cli.env["ORCHESTRATOR_GATEWAY__WORKERS"] = "2"
    cli.env["ORCHESTRATOR_ROUTING__CHOICE"] = "separated"
    cli.env["ORCHESTRATOR_LIMITS__REQUEST_TIMEOUT_S"] = str(REQUEST_TIMEOUT_S)
    facts: dict[str, Any] = cli.json("up", "--detach")
    return facts


def workers(pid: int) -> list[psutil.Process]:
    return [one for one in family(pid) if "orchestrator.commands.worker" in one.cmdline()]


def redis_of(pid: int) -> psutil.Process | None:
    """None while it is being started again."""
    for one in family(pid):
        with suppress(psutil.NoSuchProcess):
            if "redis-server" in one.name():
                return one
    return None


def another_redis(pid: int, gone: psutil.Process) -> bool:
    found = redis_of(pid)
    return found is not None and found.pid != gone.pid


def body(number: int) -> dict[str, Any]:
    """Each its own prompt."""
    parameters = {"max_new_tokens": TOKENS, "do_sample": False}
    return {"inputs": f"{number} {STORY}", "parameters": parameters}


@dataclass
class Stream:
    """One client, as it sees its answer."""

    number: int
    port: int = 0
    """Its own, by which its worker is found."""
    tokens: int = 0
    text: str | None = None
    """The whole answer, which comes with the last token."""
    broken: bool = False
    begun: threading.Event = field(default_factory=threading.Event)

    def ask(self, url: str) -> None:
        try:
            with httpx.stream(
                "POST", f"{url}/generate_stream", json=body(self.number), timeout=LIMIT_S
            ) as answer:
                self.port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        event = json.loads(line[5:])
                        self.tokens += "token" in event
                        self.text = event.get("generated_text")
                    self.begun.set()
        except httpx.TransportError:
            self.broken = True
        finally:
            self.begun.set()


def nothing_is_held(cli: CommandLine) -> bool:
    status = cli.json("status")
    return (status["outstanding"], status["reserved"], status["open_requests"]) == (
        {"records": 0, "bytes": 0},
        {"kv_tokens": 0, "slots": 0},
        0,
    )


def test_a_gateway_worker_that_is_killed_in_mid_stream_breaks_its_own_streams_and_leaves_nothing(
    cli: CommandLine, started: dict[str, Any]
) -> None:
    url, streams = started["url"], [Stream(number) for number in range(STREAMS)]
    decode = process_of(started["pid"], "decode-0")
    with ThreadPoolExecutor(STREAMS) as pool:
        # Stopped, the decode shard keeps every stream at its first token.
        decode.send_signal(signal.SIGSTOP)
        asked = []
        for stream in streams:  # one after the other: the workers take turns
            asked.append(pool.submit(stream.ask, url))
            assert stream.begun.wait(LIMIT_S)
        victim = workers(started["pid"])[0]
        of_victim = {one.raddr.port for one in victim.net_connections() if one.raddr}
        victim.kill()
        decode.send_signal(signal.SIGCONT)
        for one in asked:
            one.result(LIMIT_S)
    its_own = [stream for stream in streams if stream.port in of_victim]
    others = [stream for stream in streams if stream.port not in of_victim]
    assert its_own
    assert others
    assert {(one.broken, one.tokens) for one in its_own} == {(True, 1)}
    assert not any(one.broken for one in others)
    for one in others:
        answer = httpx.post(f"{url}/generate", json=body(one.number), timeout=LIMIT_S)
        assert one.text == answer.json()["generated_text"] != ""
    until(lambda: nothing_is_held(cli), "the release of what the dead worker held")
    until(lambda: len(workers(started["pid"])) == 2, "the relaunch of the worker")
    assert httpx.post(f"{url}/generate", json=body(99), timeout=LIMIT_S).status_code == 200
    assert cli.run("down").returncode == 0


@contextmanager
def asked_all_the_time(url: str) -> Iterator[list[Future[list[tuple[str, float]]]]]:
    """Inside, four clients ask one request after the other; their results are there after it."""
    over = threading.Event()

    def client(number: int) -> list[tuple[str, float]]:
        seen = []
        with httpx.Client(timeout=LIMIT_S) as http:
            while not over.is_set():
                began_s = time.monotonic()
                answer = http.post(f"{url}/generate", json=body(number + 4 * len(seen)))
                said = "done" if answer.status_code == 200 else answer.text
                seen.append((said, time.monotonic() - began_s))
        return seen

    with ThreadPoolExecutor(4) as pool:
        try:
            yield [pool.submit(client, number) for number in range(4)]
        finally:
            over.set()


def health(url: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{url}/health", params={"detail": 1}, timeout=LIMIT_S).json()
    return told


@pytest.mark.parametrize("trouble", ["stopped for 10 s", "killed"])
def test_redis_in_trouble_under_load_costs_no_request_and_all_is_well_again_by_itself(
    cli: CommandLine, started: dict[str, Any], trouble: str
) -> None:
    url, redis = started["url"], redis_of(started["pid"])
    assert redis is not None
    with asked_all_the_time(url) as clients:
        time.sleep(1.0)
        if trouble == "killed":
            redis.kill()
            until(lambda: another_redis(started["pid"], redis), "another Redis")
        else:
            redis.suspend()
            until(lambda: health(url)["impaired"], "a gateway that says so")
            time.sleep(10.0)
            redis.resume()
        until(lambda: cli.json("status")["degraded"] is None, "a deployment that is well again")
        time.sleep(1.0)
    seen = [one for client in clients for one in client.result()]
    assert {said for said, _ in seen} == {"done"}
    assert max(took_s for _, took_s in seen) < REQUEST_TIMEOUT_S + 2
    until(lambda: nothing_is_held(cli), "the release of everything")
    assert cli.run("down").returncode == 0
