"""A whole deployment of the tiny model: up, asked, verified, hurt, down, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .conftest import CommandLine, alive_after, family

pytestmark = pytest.mark.e2e

STORY = "The lighthouse keeper counted the ships every evening. One evening there was one ship too many, and"
GREEDY = {"inputs": STORY, "parameters": {"max_new_tokens": 8, "do_sample": False, "details": True}}
LIMIT_S = 60


@pytest.fixture
def started(cli: CommandLine) -> dict[str, Any]:
    """A detached deployment of one prefill and one decode shard."""
    facts: dict[str, Any] = cli.json("up", "--detach")
    return facts


def shards(url: str) -> dict[str, dict[str, Any]]:
    told = httpx.get(f"{url}/admin/status", timeout=10).json()
    return {shard["shard"]: shard for shard in told["shards"]}


def process_of(pid: int, shard: str) -> psutil.Process:
    """The process of a shard, found by its launch order."""
    for process in family(pid):
        spec = json.loads(process.environ().get("ORCHESTRATOR_SHARD_SPEC", "{}"))
        if spec.get("shard") == shard:
            return process
    raise AssertionError(f"no process of {shard}")


def until(condition: Any, what: str) -> Any:
    """The first true value of `condition()`; another process decides when that is."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {LIMIT_S} s")


def longest_prompt(url: str) -> httpx.Response:
    """The answer of two tokens to the longest prompt that leaves room for them: its record must fit."""
    text = "one two three " * 1500
    tokens = httpx.post(f"{url}/tokenize", json={"inputs": text}, timeout=LIMIT_S).json()
    most = httpx.get(f"{url}/info", timeout=LIMIT_S).json()["max_total_tokens"] - 2
    assert len(tokens) > most
    parameters = {"max_new_tokens": 2, "do_sample": False}
    body = {"inputs": text[: tokens[most - 1]["stop"]], "parameters": parameters}
    answer = httpx.post(f"{url}/generate", json=body, timeout=LIMIT_S)
    assert answer.headers["x-prompt-tokens"] == str(most)
    return answer


def test_a_deployment_is_started_asked_verified_and_stopped(
    cli: CommandLine, started: dict[str, Any]
) -> None:
    url, processes = started["url"], family(started["pid"])
    assert started["shards"] == ["prefill-0", "decode-0"]

    answer = httpx.post(f"{url}/generate", json=GREEDY, timeout=LIMIT_S)
    assert answer.headers["x-orchestrator-route"] == "separated"
    assert answer.headers["x-orchestrator-import"] == "hit"
    assert len(answer.json()["details"]["tokens"]) == 8

    body = {
        "model": "tgi",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) >= 2

    assert longest_prompt(url).headers["x-orchestrator-import"] == "hit"

    report = cli.json("verify", "--concurrency", "16")
    assert report["ok"]
    assert (report["different"], report["skipped"]) == (0, 0)
    assert report["compared"] >= 24 + 16
    assert report["imports"]["needed"] == report["imports"]["hits"] >= 40
    assert report["imports"]["counted_by_shards"]["hit"] >= report["imports"]["hits"]
    assert report["largest_logprob_gap"] <= 1e-4

    status = cli.json("status")
    assert status["outstanding"] == {"records": 0, "bytes": 0}
    assert status["reserved"] == {"kv_tokens": 0, "slots": 0}
    assert status["open_requests"] == 0

    arena_files = list(cli.arena.rglob("*.arena"))
    assert [path.name for path in arena_files] == ["prefill-0.0.arena"]
    assert cli.run("down").returncode == 0
    assert alive_after(processes, limit_s=10) == []
    assert cli.left_over() == []
    assert cli.run("status").returncode == 3


def test_a_shard_that_dies_ends_its_requests_with_an_error_and_comes_back_anew(
    cli: CommandLine, started: dict[str, Any]
) -> None:
    url = started["url"]
    before = shards(url)["decode-0"]["epoch"]
    decode = process_of(started["pid"], "decode-0")
    # Stopped, it takes the get leg and never answers: the request is then surely under way.
    decode.send_signal(signal.SIGSTOP)
    with httpx.stream("POST", f"{url}/generate_stream", json=GREEDY, timeout=LIMIT_S) as stream:
        events = (json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:"))
        assert next(events)["token"]["text"], "the first token comes from the prefill shard"
        decode.send_signal(signal.SIGKILL)
        last = list(events)[-1]
    assert "decode-0" in last["error"]
    assert last["error_type"]

    def renewed() -> bool:
        seen = shards(url).get("decode-0", {})
        return seen.get("state") == "ready" and seen["epoch"] > before

    until(renewed, "the relaunch of decode-0")
    answer = httpx.post(f"{url}/generate", json=GREEDY, timeout=LIMIT_S)
    assert (answer.status_code, answer.headers["x-orchestrator-import"]) == (200, "hit")
    until(lambda: cli.json("status")["outstanding"]["records"] == 0, "the release of what was reserved")
    assert cli.json("status")["reserved"] == {"kv_tokens": 0, "slots": 0}
    assert cli.run("down").returncode == 0


def test_a_gateway_that_crashes_is_started_again_on_the_same_port(
    cli: CommandLine, started: dict[str, Any]
) -> None:
    (gateway,) = [one for one in family(started["pid"]) if "orchestrator.commands.worker" in one.cmdline()]
    gateway.kill()
    answer = httpx.get(f"{started['url']}/info", timeout=LIMIT_S)
    assert answer.status_code == 200
    assert "gateway_relaunched" in Path(started["logs"]["conductor"]).read_text()
    assert cli.run("down").returncode == 0


def test_nothing_of_a_killed_deployment_lives_on_and_the_next_start_cleans_up(
    cli: CommandLine, started: dict[str, Any]
) -> None:
    processes = family(started["pid"])
    os.kill(started["pid"], signal.SIGKILL)
    assert alive_after(processes, limit_s=20) == []
    assert cli.left_over(), "a killed process cannot remove its files"
    assert cli.run("status").returncode == 3
    again = cli.json("up", "--detach")
    assert again["pid"] != started["pid"]
    assert httpx.post(f"{again['url']}/generate", json=GREEDY, timeout=LIMIT_S).status_code == 200
    assert cli.run("down").returncode == 0
    assert cli.left_over() == []


def output_until(stream: Iterator[str], mark: str) -> str:
    seen = ""
    for line in stream:
        seen += line
        if mark in line:
            return seen
    raise AssertionError(f"{mark!r} was not printed, but: {seen}")


def test_ctrl_c_in_the_foreground_stops_everything(cli: CommandLine) -> None:
    with cli.popen("up") as process:
        assert process.stdout is not None
        banner = output_until(process.stdout, "Ctrl-C")
        processes = family(process.pid)
        assert "curl -N http://127.0.0.1:" in banner
        assert "/v1/chat/completions" in banner
        assert "What is the capital of France?" in banner
        assert "status" in banner
        assert "verify" in banner
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
    assert alive_after(processes, limit_s=10) == []
    assert cli.left_over() == []


def test_ctrl_c_during_the_start_stops_what_was_begun(cli: CommandLine) -> None:
    with cli.popen("up") as process:
        assert process.stderr is not None
        output_until(process.stderr, "Waiting for")
        processes = family(process.pid)
        assert len(processes) >= 4, "Redis, two shards and the gateway are on their way"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
    assert alive_after(processes, limit_s=10) == []
    assert cli.left_over() == []


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_model_that_a_shard_refuses_is_one_sentence_and_leaves_nothing(
    cli: CommandLine, tmp_path: Path, detach: list[str]
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in cli.model.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    (bad / "tokenizer.json").write_text("{}")
    done = cli.run("up", "--model", str(bad), *detach)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "cannot start" in last
    assert "Traceback" not in done.stderr
    assert cli.left_over() == []


def test_verify_starts_a_deployment_of_its_own_when_none_runs(cli: CommandLine) -> None:
    report = cli.json("verify")
    assert report["ok"]
    assert report["compared"] >= 24
    assert cli.left_over() == []
    assert list((cli.state_home / "tgi-orchestrator").glob("verify-*")) == []


def test_verify_compares_with_the_deployments_own_mixed_shard_and_with_a_named_server(
    cli: CommandLine,
) -> None:
    facts = cli.json("up", "--detach", "--mixed", "1")
    assert facts["shards"] == ["prefill-0", "decode-0", "mixed-0"]
    report = cli.json("verify")
    assert (report["ok"], report["reference"]) == (True, "shard mixed-0")
    mixed_url = shards(facts["url"])["mixed-0"]["url"]
    report = cli.json("verify", "--url", facts["url"], "--reference", mixed_url)
    assert (report["ok"], report["reference"]) == (True, mixed_url)
    assert cli.run("down").returncode == 0
