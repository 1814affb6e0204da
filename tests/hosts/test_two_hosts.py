"""Records that cross from one host to another, and what happens when the way is cut, slow or lies.

In this order: the tests share one deployment, which starting costs too much to do for each.

The link is slowed by the kernel's token bucket (`tc tbf`) and cut with `ip link set down`; bits are
flipped by a TCP proxy on A, on the address at which B pulls, with the shard's own port on A's loopback.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from .conftest import PULL_PORT, SHARD_PORT, Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Of the tiny model: keys and values, 2 layers, 2 heads of 16 numbers of 4 bytes."""


def prompt(words: int, start: str) -> str:
    """Another one for each `start`: no cache of any kind may help."""
    return start + " one two three four five" * (words // 5)


def body(inputs: str, new_tokens: int = 8) -> dict[str, Any]:
    parameters = {"max_new_tokens": new_tokens, "do_sample": False, "details": True}
    return {"inputs": inputs, "parameters": parameters}


def ask(hosts: Hosts, inputs: str) -> tuple[str, str]:
    """The answer, and what became of its record."""
    answer = httpx.post(f"{hosts.url}/generate", json=body(inputs), timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-orchestrator-route"] == "separated", dict(answer.headers)
    return answer.json()["generated_text"], answer.headers["x-orchestrator-import"]


def at_once(hosts: Hosts, inputs: str) -> tuple[threading.Thread, list[tuple[str, str]]]:
    """The same in a thread of its own; the list has the answer once the thread has ended."""
    answers: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(hosts, inputs)))
    thread.start()
    return thread, answers


def one_more(hosts: Hosts, result: str, before: dict[str, float]) -> None:
    """Exactly one pull has ended since, and so."""
    assert hosts.pulls() == {**before, result: before.get(result, 0.0) + 1}


def epoch_of(hosts: Hosts, shard: str) -> int:
    return next(int(one["epoch"]) for one in hosts.status()["shards"] if one["shard"] == shard)


def ready_again(hosts: Hosts) -> None:
    hosts.until(lambda: hosts.state_of("prefill-0") == "ready", "the prefill shard on A")


def test_the_pair_across_hosts_answers_as_one_shard_does(hosts: Hosts) -> None:
    done = hosts.cli_on_b("verify", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    imports = hosts.status()["counters"]["kv_imports"]
    # Every record that decode used came over the link, and none failed to.
    assert imports == {"hit": imports["hit"]}
    assert hosts.pulls() == {"ok": imports["hit"]}
    assert imports["hit"] >= 30


def test_the_bytes_of_a_record_cross_the_link_once(hosts: Hosts) -> None:
    counted, sent = hosts.pulled_bytes(), hosts.a.sent_bytes()
    text = prompt(1000, "Once")
    _, result = ask(hosts, text)
    tokens = len(httpx.post(f"{hosts.url}/tokenize", json={"inputs": text}, timeout=60).json())
    assert result == "hit"
    assert hosts.pulled_bytes() - counted == tokens * TOKEN_BYTES
    # And little beside it: frames, headers of packets, the tokens' ids and events.
    assert tokens * TOKEN_BYTES < hosts.a.sent_bytes() - sent < 1.25 * tokens * TOKEN_BYTES + 100_000


def test_a_link_that_is_cut_in_a_pull_costs_that_pull_only(hosts: Hosts) -> None:
    text = prompt(1500, "Cut")
    expected, _ = ask(hosts, text)
    before, sent = hosts.pulls(), hosts.a.sent_bytes()
    with hosts.a.slowed("3mbit"):
        thread, answers = at_once(hosts, text)
        hosts.until(lambda: hosts.a.sent_bytes() - sent > 200_000, "the first part of the record")
        assert hosts.pulls() == before
        hosts.a.set_link("down")
    thread.join(60)
    assert answers == [(expected, "link")]
    one_more(hosts, "link", before)
    hosts.a.set_link("up")
    ready_again(hosts)
    assert ask(hosts, text) == (expected, "hit")


def test_a_slow_link_is_waited_for_within_the_time_for_records(hosts: Hosts) -> None:
    text = prompt(1500, "Slow")
    expected, _ = ask(hosts, text)
    before = hosts.pulls()
    with hosts.a.slowed("4mbit"):
        assert ask(hosts, text) == (expected, "hit")
    one_more(hosts, "ok", before)
    with hosts.a.slowed("400kbit"):
        assert ask(hosts, text) == (expected, "link")
    one_more(hosts, "link", {**before, "ok": before["ok"] + 1})
    ready_again(hosts)
    assert ask(hosts, text) == (expected, "hit")


def test_a_shard_that_is_started_anew_elsewhere_is_found_and_a_flipped_bit_is_not_believed(
    hosts: Hosts,
) -> None:
    text = prompt(1500, "Flip")
    expected, _ = ask(hosts, text)
    epoch = epoch_of(hosts, "prefill-0")
    assert hosts.stop("prefill") == 0
    assert not list(hosts.a.arena.rglob("*.arena"))
    flip_file = hosts.folder / "flip"
    hosts.start_proxy(f"{hosts.a.address}:{PULL_PORT}", f"127.0.0.1:{PULL_PORT}", flip_file)
    hosts.start_prefill(f"127.0.0.1:{PULL_PORT}")
    hosts.until(lambda: epoch_of(hosts, "prefill-0") > epoch, "a new epoch of the prefill shard")
    ready_again(hosts)
    assert ask(hosts, text) == (expected, "hit")  # through the proxy
    before = hosts.pulls()
    flip_file.write_text("200000")
    assert ask(hosts, text) == (expected, "checksum")
    one_more(hosts, "checksum", before)
    flip_file.unlink()
    assert ask(hosts, text) == (expected, "hit")


def test_the_deployment_ends_without_the_shard_on_the_other_host(hosts: Hosts) -> None:
    shown = [hosts.cli_on_b(*command) for command in (("status", "--json"), ("config", "show", "--json"))]
    key = hosts.key_file.read_text()
    assert str(hosts.key_file) in shown[1].stdout
    assert not any(key in one.stdout + one.stderr for one in shown)
    state = next(hosts.folder.rglob("state.json")).read_text()
    assert "prefill-0" in state
    down = hosts.cli_on_b("down")
    assert down.returncode == 0, down.stderr
    assert hosts.running["prefill"].poll() is None
    assert not hosts.b.arena.exists()
    written = [path for path in hosts.folder.rglob("*") if path.is_file() and path != hosts.key_file]
    assert len(written) >= 4  # logs of both hosts
    assert [str(path) for path in written if key.encode() in path.read_bytes()] == []
    assert key not in state
    assert hosts.stop("prefill") == 0


def test_a_decode_shard_on_the_other_host_pulls_from_the_address_that_prefill_listens_on(
    hosts: Hosts,
) -> None:
    """The gateway reaches its own prefill shard at loopback, where nobody else does."""
    hosts.start_shard("decode")
    changes = {
        "ORCHESTRATOR_SHARDS__PREFILL__URLS": "",
        "ORCHESTRATOR_SHARDS__PREFILL__CPUS": "[[1]]",
        "ORCHESTRATOR_SHARDS__DECODE__URLS": json.dumps([f"http://{hosts.a.address}:{SHARD_PORT}"]),
        "ORCHESTRATOR_SHARDS__DECODE__CPUS": "",
        "ORCHESTRATOR_ARENA__PULL_LISTEN": f"{hosts.b.address}:{PULL_PORT}",
    }
    up = hosts.cli_on_b("up", "--detach", **changes)
    assert up.returncode == 0, up.stderr
    hosts.until(lambda: hosts.state_of("decode-0") == "ready", "the decode shard on A")
    assert ask(hosts, prompt(500, "Back"))[1] == "hit"
    assert hosts.pulls() == {"ok": 1.0}
    assert hosts.cli_on_b("down").returncode == 0
    assert hosts.stop("decode") == 0
    # Nothing is left of either: copies were in A's arena folder, records in B's.
    assert not list(hosts.a.arena.rglob("*.arena"))
    assert not hosts.b.arena.exists()
