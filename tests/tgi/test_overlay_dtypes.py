"""Every dtype of weights and cache, on a random model whose prompts end on both sides of a block's edge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.shard.seam import Stopping
from orchestrator.embedded.tgi.model import ModelLimits
from tests.tgi.pair import Prompt, told, trio
from tests.tgi.prompts import tokenizer_of
from tests.tgi.servers import ServerPlan, Servers

LIMITS = ModelLimits(max_input_tokens=200, max_total_tokens=256, max_batch_prefill_tokens=256)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200)

DTYPES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float16, fp8 cache": {"dtype": "float16", "kv_dtype": "fp8_e5m2"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, fp8 cache": {"kv_dtype": "fp8_e5m2"},
    "causal, bfloat16": {"flash": False, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("changes", DTYPES.values(), ids=DTYPES)
async def test_prompts_around_block_edges_answer_as_on_a_stock_server(
    changes: dict[str, Any], servers: Servers, tiny: Path, tgi_python: Path
) -> None:
    tokenizer = tokenizer_of(tiny)
    word = tokenizer(" the")["input_ids"]
    assert len(word) == 1
    with trio(servers, replace(ServerPlan(tiny), **changes), tgi_python) as started:
        async with started.models(LIMITS) as models:
            for length in LENGTHS:
                prompt = Prompt(" the" * length, tuple(word * length))
                asked = models.ask(prompt, Stopping(8, ignore_eos_token=True), top_n_tokens=5)
                separated = await models.separated(asked)
                assert separated[0].import_result == "hit"
                assert told(separated) == told(await models.colocated(asked)), length
            assert started.get.report.imports == {"hit": len(LENGTHS)}
