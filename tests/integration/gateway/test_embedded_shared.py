"""One prefill for several requests: who answers from an earlier request's record says what one shard says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from orchestrator.shards.client import ShardClient

from .test_embedded_pair import CHAT, PROMPT, answer_in, pair


async def records(queue: Any) -> tuple[dict[str, int], dict[str, int]]:
    """What the prefill shard has counted of its exports, and the decode shard of its imports."""
    client = ShardClient()
    try:
        prefill, decode = [await client.status(view.url) for view in queue.shards()]
        return dict(prefill.exports), dict(decode.imports)
    finally:
        await client.aclose()


async def share_first(gate: Any, queue: Any, path: str, body: dict[str, Any]) -> None:
    """Answer `body` in the usual way; all that follows is to answer from its record."""
    told = await gate.post(path, json=body)
    assert (told.status_code, told.headers["x-orchestrator-reason"]) == (200, "pair")
    queue.share_of = queue.granted[-1]


def spoken(told: Any) -> Any:
    """Without log probabilities: one row rounds differently from a whole prompt."""
    if isinstance(told, dict):
        return {name: spoken(value) for name, value in told.items() if "logprob" not in name}
    return [spoken(item) for item in told] if isinstance(told, list) else told


def generate(**parameters: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True} | parameters}


SAMPLED = {"do_sample": True, "temperature": 1.5}
GREEDY_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/generate", generate(), generate()),
    ("/generate_stream", generate(), generate()),
    ("/generate_stream", generate(**SAMPLED, seed=1), generate()),
    ("/v1/chat/completions", CHAT, CHAT | {"temperature": 0}),
    ("/v1/chat/completions", CHAT, CHAT | {"temperature": 0, "stream": True}),
    ("/v1/completions", {"prompt": PROMPT, "seed": 4}, {"prompt": PROMPT, "temperature": 0, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "owner", "body"), GREEDY_CASES)
async def test_a_greedy_answer_from_a_shared_record_is_one_shards(
    tiny_model: Path, tmp_path: Path, listening: Any, payloads_of: Any, path: str, owner: Any, body: Any
) -> None:
    async with pair(tiny_model, tmp_path / "arenas", listening) as (gate, alone, queue):
        await share_first(gate, queue, path, owner)
        got, told = await gate.post(path, json=body), await alone.post(path, json=body)
        assert (got.status_code, got.headers["x-orchestrator-reason"]) == (200, "shared")
        assert spoken(answer_in(got, payloads_of)) == spoken(answer_in(told, payloads_of))
        assert await records(queue) == ({"ok": 1}, {"hit": 2})


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_who_shares_a_record_samples_with_its_own_seed_from_its_first_token_on(
    tiny_model: Path, tmp_path: Path, listening: Any, payloads_of: Any, path: str
) -> None:
    async with pair(tiny_model, tmp_path / "arenas", listening) as (gate, alone, queue):
        await share_first(gate, queue, path, generate(**SAMPLED, seed=1))
        answers = []
        for seed in (2, 3, 4, 1):
            body = generate(**SAMPLED, seed=seed)
            got, told = await gate.post(path, json=body), await alone.post(path, json=body)
            assert spoken(answer_in(got, payloads_of)) == spoken(answer_in(told, payloads_of))
            answers.append(spoken(answer_in(got, payloads_of)))
        assert all(one != other for one, other in itertools.combinations(answers, 2))
        assert [end.imported for end in queue.completions] == [True] * 5
        assert await records(queue) == ({"ok": 1}, {"hit": 5})


async def test_a_shared_record_of_another_prompt_is_a_miss_and_still_the_right_answer(
    tiny_model: Path, tmp_path: Path, listening: Any
) -> None:
    async with pair(tiny_model, tmp_path / "arenas", listening) as (gate, alone, queue):
        await share_first(gate, queue, "/generate", generate())
        body = generate() | {"inputs": PROMPT + " then"}
        got, told = await gate.post("/generate", json=body), await alone.post("/generate", json=body)
        assert spoken(got.json()) == spoken(told.json())
        assert got.headers["x-orchestrator-import"] == "tokens_differ"
        assert queue.completions[-1].imported is False
