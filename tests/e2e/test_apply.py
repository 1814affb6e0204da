"""Real shards that are changed, and drained, while clients stream from them."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

import httpx
import pytest

from .conftest import CommandLine

pytestmark = pytest.mark.e2e

LIMIT_S = 60
BODY = {"inputs": "The lighthouse keeper counted the ships", "parameters": {"max_new_tokens": 40}}


def streamed(url: str) -> str:
    """The whole text of one stream; what it had been told so far where it breaks."""
    events = []
    with httpx.stream("POST", f"{url}/generate_stream", json=BODY, timeout=LIMIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]
    assert events[-1].get("generated_text"), events[-1]
    return str(events[-1]["generated_text"])


class Clients:
    """Three that stream one answer after the other."""

    def __init__(self, url: str) -> None:
        self.texts: list[str] = []
        self.failed: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.texts.append(streamed(self._url))
            except (httpx.HTTPError, AssertionError) as error:
                self.failed.append(repr(error))
                return


def epochs(url: str) -> dict[str, int]:
    told = httpx.get(f"{url}/admin/status", timeout=10).json()
    return {shard["shard"]: shard["epoch"] for shard in told["shards"]}


def test_changed_limits_and_counts_are_rolled_under_load_and_no_request_is_lost(cli: CommandLine) -> None:
    facts: dict[str, Any] = cli.json("up", "--detach")
    url = facts["url"]
    expected, before = streamed(url), epochs(url)
    assert set(before) == {"prefill-0", "decode-0"}
    assert "Nothing to do" in cli.run("apply").stdout
    cli.env |= {
        "ORCHESTRATOR_LIMITS__MAX_CONCURRENT_REQUESTS": "64",
        "ORCHESTRATOR_SHARDS__DECODE__COUNT": "2",
        "ORCHESTRATOR_GATEWAY__KEEP_ALIVE_S": "7",
    }
    dry = cli.json("apply", "--dry-run")
    assert [one["shard"] for one in dry["shards"]["changed"]] == ["prefill-0", "decode-0"]
    prefill, decode = (one["changes"] for one in dry["shards"]["changed"])
    assert decode == [{"name": "max_concurrent_requests", "old": 128, "new": 64}]
    # With two decode shards hot prompts are worth a region of their own.
    assert [change["name"] for change in prefill] == ["max_concurrent_requests", "pinned_bytes"]
    assert len(dry["shards"]["added"]) == 1
    assert dry["restart"] == [{"name": "gateway.keep_alive_s", "old": 15.0, "new": 7.0}]
    assert epochs(url) == before
    with Clients(url) as clients:
        told = cli.json("apply")
    assert told["roll"]["state"] == "done", told["roll"]
    assert clients.failed == []
    assert set(clients.texts) == {expected}
    assert set(epochs(url).values()).isdisjoint(before.values())
    assert sorted(name.partition("-")[0] for name in epochs(url)) == ["decode", "decode", "prefill"]

    spare, other = sorted(name for name in epochs(url) if name.startswith("decode"))
    drained = cli.json("drain", spare, "--wait")
    assert (drained["idle"], drained["warning"]) == (True, "")
    assert streamed(url) == expected
    assert f"Shard {spare} is drained by an operator" in cli.run("status").stdout
    assert cli.json("drain", other)["warning"].startswith("No other shard that decodes is ready")
    for shard in (spare, other):
        assert cli.json("drain", shard, "--undo")["changed"]

    cli.env["ORCHESTRATOR_MODEL__DTYPE"] = "bfloat16"
    refused = cli.run("apply")
    assert refused.returncode == 2
    assert refused.stderr.startswith("model.dtype differs from what runs")
    assert cli.run("down").returncode == 0
    assert cli.left_over() == []
