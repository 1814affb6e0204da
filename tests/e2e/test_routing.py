"""What a deployment learns about its own speed, what it makes of it, and prompts that come more than once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import CommandLine
from .test_up import LIMIT_S, shards, until

pytestmark = pytest.mark.e2e

TEXT = "In the spring of the year the fleet lay at anchor below the {} hill, and nobody spoke of the winter. "


def ask(url: str, text: str, tokens: int = 8, **headers: str) -> httpx.Response:
    body = {"inputs": text, "parameters": {"max_new_tokens": tokens, "do_sample": False}}
    answer = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer


def predicted(answer: httpx.Response) -> dict[str, float]:
    words = answer.headers["x-orchestrator-predicted"].split()
    return {name: float(value) for name, _, value in (word.partition("=") for word in words)}


def status(url: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{url}/admin/status", timeout=LIMIT_S).json()
    return told


def costs_file(cli: CommandLine) -> Path:
    return cli.state_home / "tgi-orchestrator" / cli.name / "costs.json"


def test_a_fresh_deployment_measures_itself_and_then_chooses_by_what_it_predicts(cli: CommandLine) -> None:
    cli.env["ORCHESTRATOR_ROUTING__CHOICE"] = "auto"
    url = cli.json("up", "--detach")["url"]
    until(lambda: all(shard["costs"] for shard in shards(url).values()), "a calibration")
    until(lambda: status(url)["reserved"] == {"kv_tokens": 0, "slots": 0}, "the end of what calibrates")
    answer = ask(url, TEXT.format("green"), **{"x-orchestrator-debug": "1"})
    told = predicted(answer)
    way = answer.headers["x-orchestrator-route"]
    # Nobody else is there, so that nobody is disturbed: the quicker way is the cheaper one.  Of two that are
    # told as equal to the millisecond it may be either.
    assert told[way] == min(told.values())
    assert answer.headers["x-orchestrator-reason"] == ("break_even" if way == "mixed" else "pair")
    for forced in ("separated", "mixed"):
        answer = ask(url, TEXT.format("red"), **{"x-orchestrator-choice": forced})
        assert answer.headers["x-orchestrator-route"] == forced
    assert "prefill tok/s" in cli.run("status").stdout
    assert cli.run("down").returncode == 0
    kept: dict[str, Any] = json.loads(costs_file(cli).read_text())
    (profile,) = kept["profiles"].values()
    assert profile["prefill"]["per_token_s"] >= 0
    assert profile["decode"]["fixed_s"] + profile["decode"]["per_sequence_s"] > 0

    again = cli.json("up", "--detach")["url"]
    until(lambda: all(shard["costs"] for shard in shards(again).values()), "the costs of the last time")
    assert "shard_calibrated" not in cli.run("logs", "conductor").stdout


def test_requests_with_equal_prompts_share_one_prefill_each(cli: CommandLine) -> None:
    url = cli.json("up", "--detach", "--decode", "2")["url"]
    texts = [TEXT.format(name) * 4 for name in ("green", "grey", "bare")]
    alone = [ask(url, text).json()["generated_text"] for text in texts]
    prefill = shards(url)["prefill-0"]["url"]
    before = exports(prefill)
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: ask(url, texts[number % 3]), range(48)))
    assert exports(prefill) == before, "their records were there already"
    for number, answer in enumerate(answers):
        assert answer.json()["generated_text"] == alone[number % 3]
    assert {answer.headers["x-orchestrator-reason"] for answer in answers} == {"shared"}
    assert {answer.headers["x-orchestrator-import"] for answer in answers} == {"hit"}

    fresh = [TEXT.format(name) * 4 for name in ("white", "black", "blue")]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: ask(url, fresh[number % 3]), range(60)))
    assert exports(prefill) == before + 3, "the first of each computes, the others read"
    for first in range(3):
        assert len({answer.json()["generated_text"] for answer in answers[first::3]}) == 1
    told = status(url)
    assert told["reserved"] == {"kv_tokens": 0, "slots": 0}
    assert told["outstanding"] == {"records": 0, "bytes": 0}


def exports(shard_url: str) -> int:
    """Records that a shard has written."""
    lines = httpx.get(f"{shard_url}/metrics", timeout=LIMIT_S).text.splitlines()
    counted = [line for line in lines if line.startswith("orchestrator_kv_exports_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in counted)
