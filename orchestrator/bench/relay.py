"""What the separated path costs a request, on a running deployment.

Time to first token through gateway, ticket, prefill with export, against the same prompt sent
straight to the prefill shard; both take turns.  And what the processes' memory does over many requests.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from orchestrator.errors import Unreachable

_WORDS = ("river", "stone", "lamp", "paper", "window", "garden", "engine", "letter", "bridge", "winter")
_PROMPT_WORDS = 290
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """Medians in ms; `added` is separated over alone, less one."""

    prompt_tokens: int
    alone_ms: float
    separated_ms: float
    added: float
    queue_ms: float
    prefill_ms: float
    relay_ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process without files and shared memory (so without arenas), in MB."""

    process: str
    after_first_mb: float
    after_last_mb: float
    ratio: float


def time_to_first_token(gateway: httpx.Client, shard_url: str, rounds: int) -> dict[str, Any]:
    """Prompts of about 300 tokens, no two alike, with the fields of TimeToFirstToken.

    `shard_url` is the prefill shard's own address.
    """
    chance = random.Random(3)
    alone, separated, phases = [], [], []
    tokens = 0
    with httpx.Client(base_url=shard_url, timeout=TIMEOUT_S, trust_env=False) as shard:
        for number in range(rounds + 1):
            body = _body(chance, _PROMPT_WORDS, 4)
            first_alone, _ = _first_token(shard, body)
            first_separated, timing = _first_token(gateway, body)
            if number:  # the first round warms up
                alone.append(first_alone)
                separated.append(first_separated)
                phases.append(timing)
            tokens = len(shard.post("/tokenize", json=body).json())
    alone_ms, separated_ms = statistics.median(alone) * 1e3, statistics.median(separated) * 1e3
    middle = {name: statistics.median(p.get(name, 0.0) for p in phases) for name in phases[0]}
    return asdict(
        TimeToFirstToken(
            prompt_tokens=tokens,
            alone_ms=round(alone_ms, 1),
            separated_ms=round(separated_ms, 1),
            added=round(separated_ms / alone_ms - 1, 4),
            queue_ms=middle.get("queue", 0.0),
            prefill_ms=middle.get("prefill", 0.0),
            relay_ms=middle.get("relay", 0.0),
        )
    )


def memory(gateway: httpx.Client, pids: dict[str, int], *, first: int, last: int) -> list[dict[str, Any]]:
    """Memory of each process after `first` and after `last` requests of mixed lengths."""
    chance = random.Random(4)
    seen: dict[str, list[float]] = {name: [] for name in pids}
    for number in range(1, last + 1):
        body = _body(chance, chance.choice((4, 30, 120, 290)), chance.choice((1, 2, 8, 16)))
        route = chance.choice(("generate", "generate_stream"))
        gateway.post(f"/{route}", json=body).raise_for_status()
        if number in (first, last):
            for name, pid in pids.items():
                seen[name].append(anonymous_mb(pid))
    return [
        asdict(Memory(name, round(values[0], 1), round(values[-1], 1), round(values[-1] / values[0], 4)))
        for name, values in seen.items()
    ]


def anonymous_mb(pid: int) -> float:
    """`RssAnon` of a process, MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise Unreachable(f"Process {pid} shows no memory.")


def _first_token(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """(seconds to the first token, phases in ms as the gateway tells them at the end)."""
    start = time.perf_counter()
    first = 0.0
    timing: dict[str, float] = {}
    headers = {"x-orchestrator-debug": "1", "x-orchestrator-choice": "separated"}
    with client.stream("POST", "/generate_stream", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data:") and not first:
                first = time.perf_counter() - start
            elif line.startswith(": orchestrator"):
                timing = dict(_durations(line))
    return first, timing


def _durations(line: str) -> Iterator[tuple[str, float]]:
    for word in line.replace(",", " ").split():
        name, separator, value = word.partition(";dur=")
        if separator:
            yield name, float(value)


def prefill_url(admin: httpx.Client) -> str:
    """Of a prefill shard that is ready; Unreachable where there is none."""
    for shard in admin.get("/admin/status").raise_for_status().json()["shards"]:
        if shard["role"] == "prefill" and shard["state"] == "ready":
            return str(shard["url"])
    raise Unreachable(f"No prefill shard is ready behind {admin.base_url}.")


def _body(chance: random.Random, words: int, new_tokens: int) -> dict[str, Any]:
    text = " ".join(chance.choice(_WORDS) for _ in range(words))
    return {"inputs": text, "parameters": {"max_new_tokens": new_tokens, "ignore_eos_token": True}}
