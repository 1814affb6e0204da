"""Answers of more than 1,024 tokens, which TGI's router makes in pieces: equal to stock, in float32.

`LongAnswer` does what the router does (router/src/infer/mod.rs): at the end of a piece it sends the text so
far as a new prompt, with everything else as it was.  `python -m tests.tgi.long_answer` runs one of 3,000.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.tgi.long_answer import LIMITS, LongAnswer
from tests.tgi.pair import ARENA_BYTES, Prompt, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers

TEXT = "Write a long story about a lighthouse keeper and the sea.\n\nOnce upon a time"
NEW_TOKENS = 1100


async def test_a_long_answer_goes_on_from_its_own_kv(servers: Servers, model: Path, tgi_python: Path) -> None:
    """SmolLM2 writes text that becomes the same tokens again, so that next to nothing is computed twice."""
    prompt = prompt_of(tokenizer_of(model), TEXT)
    with trio(servers, ServerPlan(model), tgi_python, arena_bytes=2 * ARENA_BYTES) as started:
        async with started.models(LIMITS) as models:
            answer = LongAnswer(models, tokenizer_of(model), prompt, NEW_TOKENS)
            separated, colocated = await asyncio.gather(answer.separated(), answer.colocated())
            assert separated.tokens == colocated.tokens
        report = started.get.report
        assert report.imports == {"hit": 1, "resumed": 1}
        assert report.exports["kept"] >= 1
        assert report.faults == 0
        continued = separated.prompt_tokens[1]
        assert continued > 1024
        imported_first = len(prompt.ids) - 1
        assert report.imported_tokens + report.recomputed_tokens == len(prompt.ids) + continued
        assert report.imported_tokens - imported_first > 0.95 * continued


@pytest.mark.parametrize("arena_bytes", [2 * ARENA_BYTES, 0], ids=["with a ring", "without"])
async def test_text_that_becomes_other_tokens_costs_a_prefill_at_most(
    servers: Servers, tiny: Path, tgi_python: Path, arena_bytes: int
) -> None:
    """A random model chooses tokens that its text is not cut into again; on two ranks, both do the same."""
    prompt = prompt_of(tokenizer_of(tiny), "abc def ghi")
    spec: dict[str, Any] = {"arena_bytes": arena_bytes}
    with trio(servers, ServerPlan(tiny), tgi_python, ranks=(1, 2), **spec) as started:
        async with started.models(LIMITS) as models:
            answer = LongAnswer(models, tokenizer_of(tiny), prompt, NEW_TOKENS)
            separated, colocated = await asyncio.gather(answer.separated(), answer.colocated())
            assert separated.tokens == colocated.tokens
        one, other = started.get.reports
        assert one.imports == other.imports
        assert one.imports["hit"] == 1
        assert sum(one.imports.values()) == 2
        assert (one.exports.get("kept", 0) > 0) == (arena_bytes > 0)
        assert one.faults == other.faults == 0


async def test_a_continuation_never_begins_with_the_answers_first_token(
    servers: Servers, model: Path, tgi_python: Path
) -> None:
    """CausalLM has no slots to import into: it prefills, and must not be told how to go on."""
    prompt: Prompt = prompt_of(tokenizer_of(model), TEXT)
    with trio(servers, ServerPlan(model, flash=False), tgi_python) as started:
        async with started.models(LIMITS) as models:
            answer = LongAnswer(models, tokenizer_of(model), prompt, 40, piece_tokens=32)
            assert (await answer.separated()).tokens == (await answer.colocated()).tokens
        assert started.get.report.imports == {"hit": 1, "unsupported": 1}
