"""A deployment whose shards are containers, from `up` to `down`, as a user has it on a Docker host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.shards.docker.names import container_name

from .cli import DockerLine
from .engine import containers_of, docker, inspected, left_of, remove_all

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

LIMIT_S = 90.0
DIGITS = 3500
"""Of a long answer: a grammar keeps the small model from ending it before."""


def ask(url: str, text: str = "The quick brown fox") -> httpx.Response:
    body = {"inputs": text, "parameters": {"max_new_tokens": 8}}
    return httpx.post(f"{url}/generate", json=body, timeout=LIMIT_S)


def shards(url: str) -> dict[str, Mapping[str, Any]]:
    told = httpx.get(f"{url}/admin/status", timeout=LIMIT_S).json()
    return {shard["shard"]: shard for shard in told["shards"]}


def until(reached: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < end_s, f"waited too long for {what}"
        time.sleep(0.2)


class Stream:
    """A long answer, read in a thread until it ends."""

    def __init__(self, url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.events) > 5 or self.failure is not None, "the first tokens")

    def _read(self) -> None:
        grammar = {"type": "regex", "value": f"[0-9]{{{DIGITS}}}"}
        parameters = {"max_new_tokens": DIGITS, "do_sample": False, "grammar": grammar}
        body = {"inputs": "The quick brown fox", "parameters": parameters}
        try:
            with httpx.stream("POST", f"{self._url}/generate_stream", json=body, timeout=LIMIT_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        self.events.append(json.loads(line.removeprefix("data:")))
        except httpx.HTTPError as error:
            self.failure = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def text(self) -> str:
        """The whole answer, which must have come to its end."""
        self._thread.join(LIMIT_S)
        assert self.ended
        assert self.failure is None
        assert [event["index"] for event in self.events] == list(range(1, len(self.events) + 1))
        whole: str = self.events[-1]["generated_text"]
        return whole


def ids(deployment: str) -> dict[str, str]:
    """Of its containers, by name."""
    return {name: inspected(name)["Id"] for name in containers_of(deployment)}


def end_up(cli: DockerLine, number: signal.Signals) -> None:
    """The `up` process is told, or killed, and is gone."""
    pid = json.loads(cli.state_file.read_text())["pid"]
    os.kill(pid, number)
    until(lambda: not _lives(pid), "the end of `up`")


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - gone between two looks
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def foreground(cli: DockerLine) -> Iterator[subprocess.Popen[str]]:
    process = cli.popen("up", "--json")
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_pair_in_containers_answers_heals_and_leaves_nothing(
    docker_cli: DockerLine,
) -> None:
    cli = docker_cli
    url = cli.json("up", "--detach")["url"]
    names = [container_name(cli.name, shard) for shard in ("prefill-0", "decode-0")]
    assert sorted(containers_of(cli.name)) == sorted(names)
    answer = ask(url)
    assert answer.headers["x-orchestrator-route"] == "separated"
    assert answer.headers["x-orchestrator-import"] == "hit"
    verified = cli.run("verify", "--json", limit_s=200)
    assert verified.returncode == 0, verified.stderr
    assert '"event": "generation"' in cli.run("logs", "decode-0").stdout

    before = shards(url)["decode-0"]["epoch"]
    docker("kill", names[1])
    until(lambda: shards(url)["decode-0"]["state"] != "ready", "the loss to be seen")
    until(lambda: shards(url)["decode-0"]["state"] == "ready", "a new decode shard")
    assert shards(url)["decode-0"]["epoch"] != before
    assert ask(url).json() == answer.json()

    assert cli.run("down").returncode == 0
    assert left_of(cli.name) == []
    assert not cli.state_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_orchestrator_that_is_restarted_adopts_its_shards_and_breaks_no_stream(
    docker_cli: DockerLine, number: signal.Signals
) -> None:
    cli = docker_cli
    url = cli.json("up", "--detach")["url"]
    cli.env["ORCHESTRATOR_GATEWAY__LISTEN"] = url.removeprefix("http://")
    before, epochs = ids(cli.name), {n: s["epoch"] for n, s in shards(url).items()}
    stream = Stream(url)
    end_up(cli, number)
    assert not stream.ended, "the answer was too short to show anything"
    assert cli.json("up", "--detach")["url"] == url
    assert ids(cli.name) == before
    assert {n: s["epoch"] for n, s in shards(url).items()} == epochs
    assert ask(url).status_code == 200
    assert len(stream.text()) == DIGITS


class Load:
    """Clients that ask one request after another until they are told to stop, and what they were answered."""

    def __init__(self, url: str, clients: int) -> None:
        self.answers: list[tuple[int, str]] = []
        self.failures: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                answer = ask(self._url)
                self.answers.append((answer.status_code, answer.json().get("generated_text", answer.text)))
            except (httpx.HTTPError, ValueError) as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def test_a_changed_argument_of_decode_is_rolled_under_load_and_loses_no_request(
    docker_cli: DockerLine,
) -> None:
    cli = docker_cli
    url = cli.json("up", "--detach")["url"]
    before, text = ids(cli.name), ask(url).json()["generated_text"]
    load = Load(url, clients=4)
    stream = Stream(url)
    cli.env["ORCHESTRATOR_SHARDS__DECODE__ENV"] = json.dumps({"TRIED": "1"})
    dry = cli.json("apply", "--dry-run")
    assert [changed["shard"] for changed in dry["shards"]["changed"]] == ["decode-0"]
    assert ids(cli.name) == before
    told = cli.json("apply")
    load.stop()
    assert told["roll"]["state"] == "done"
    assert load.failures == []
    assert set(load.answers) == {(200, text)}
    assert len(load.answers) > 10
    assert len(stream.text()) == DIGITS
    after = ids(cli.name)
    prefill, decode = (container_name(cli.name, shard) for shard in ("prefill-0", "decode-1"))
    assert after.keys() == {prefill, decode}
    assert after[prefill] == before[prefill], "what is not changed goes on"
    assert "TRIED=1" in inspected(decode)["Config"]["Env"]
    assert "Nothing to do" in cli.run("apply").stdout

    assert cli.run("drain", "decode-1", "--wait").returncode == 0
    assert ask(url).headers["x-orchestrator-route"] == "mixed"
    assert cli.run("drain", "decode-1", "--undo").returncode == 0
    until(lambda: ask(url).headers["x-orchestrator-route"] == "separated", "the shard to serve again")


def test_two_deployments_share_an_engine_and_nothing_else(docker_cli: DockerLine) -> None:
    first = docker_cli.json("up", "--detach")["url"]
    name, other = docker_cli.name, f"{docker_cli.name}-b"
    docker_cli.env["ORCHESTRATOR_DEPLOYMENT"] = other
    try:
        second = docker_cli.json("up", "--detach")["url"]
        assert ask(first).json() == ask(second).json()
        assert docker_cli.run("down").returncode == 0
        assert left_of(other) == []
        assert ask(first).status_code == 200
    finally:
        docker_cli.env["ORCHESTRATOR_DEPLOYMENT"] = name
        remove_all(other)


def test_ctrl_c_removes_what_a_foreground_up_launched(
    docker_cli: DockerLine,
) -> None:
    with foreground(docker_cli) as process:
        until(docker_cli.state_file.exists, "a state file")
        until(lambda: len(containers_of(docker_cli.name)) == 2, "two containers")
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["shards"] == ["prefill-0", "decode-0"]
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert left_of(docker_cli.name) == []


def test_down_removes_shards_whose_orchestrator_left_them(
    docker_cli: DockerLine,
) -> None:
    docker_cli.json("up", "--detach")
    end_up(docker_cli, signal.SIGTERM)
    assert len(containers_of(docker_cli.name)) == 2
    done = docker_cli.run("down")
    assert done.returncode == 0, done.stderr
    assert f"Removed {container_name(docker_cli.name, 'decode-0')}." in done.stderr
    assert left_of(docker_cli.name) == []
    assert docker_cli.run("down").returncode == 3, "there is nothing any more"


def test_a_shard_without_enough_memory_ends_up_in_a_sentence_and_nothing_is_left(
    docker_cli: DockerLine,
) -> None:
    docker_cli.env["ORCHESTRATOR_SHARDS__DECODE__MEMORY_BYTES"] = str(48 * 2**20)
    done = docker_cli.run("up", "--detach")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Shard decode-0 ended 3 times in a row")
    assert "memory" in last
    assert left_of(docker_cli.name) == []


def test_a_shard_that_the_engine_refuses_takes_the_launch_of_the_others_back(docker_cli: DockerLine) -> None:
    docker_cli.env["ORCHESTRATOR_SHARDS__DECODE__MEMORY_BYTES"] = "1000"
    for _ in range(3):  # the other shard is just being created, or a moment before or after
        done = docker_cli.run("up", "--detach")
        assert done.returncode == 2
        assert "has a memory limit below" in done.stderr.strip().splitlines()[-1]
        assert left_of(docker_cli.name) == []
    docker_cli.env.pop("ORCHESTRATOR_SHARDS__DECODE__MEMORY_BYTES")
    assert ask(docker_cli.json("up", "--detach")["url"]).status_code == 200


def test_a_name_that_another_state_folder_has_on_the_engine_is_left_to_it(
    docker_cli: DockerLine, tmp_path: Path
) -> None:
    url = docker_cli.json("up", "--detach")["url"]
    before = ids(docker_cli.name)
    docker_cli.env["XDG_STATE_HOME"] = str(tmp_path)
    done = docker_cli.run("up", "--detach")
    assert done.returncode == 2
    assert "runs on this engine already, launched from another state folder" in done.stderr
    assert docker_cli.run("down").returncode == 3
    assert ids(docker_cli.name) == before
    assert ask(url).status_code == 200
    docker_cli.env["XDG_STATE_HOME"] = str(docker_cli.state_home)
    end_up(docker_cli, signal.SIGTERM)
    docker_cli.env["XDG_STATE_HOME"] = str(tmp_path)
    assert docker_cli.run("down", "--force").returncode == 0
    assert left_of(docker_cli.name) == []


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("DOCKER__HOST", "unix:///nowhere.sock", "No Docker engine answers at unix:///nowhere.sock"),
        ("DOCKER__IMAGE", "never-built:1", "has no image never-built:1: build or pull it first"),
        ("SHARDS__PREFILL__GPUS", '[["GPU-1"]]', "names GPU-1, and no GPU can be seen from here"),
        ("SHARDS__DECODE__MEMORY_BYTES", str(2**50), "memory limits are"),
        ("ARENA__BYTES", str(2**45), "GiB together and the host has"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_launched(
    docker_cli: DockerLine, setting: str, value: str, told: str
) -> None:
    docker_cli.env[f"ORCHESTRATOR_{setting}"] = value
    done = docker_cli.run("up", "--detach")
    assert done.returncode == 2
    assert told in done.stderr.strip().splitlines()[-1]
    assert left_of(docker_cli.name) == []
