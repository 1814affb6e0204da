"""`verify` on model families whose attention differs: windows, soft caps, norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from .conftest import CommandLine

pytestmark = pytest.mark.e2e

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **ids: transformers.Qwen3Config(**SIZES, **ids, head_dim=16),
    "mistral": lambda **ids: transformers.MistralConfig(**SIZES, **ids, sliding_window=32),
    "gemma2": lambda **ids: transformers.Gemma2Config(
        **SIZES, **ids, head_dim=16, sliding_window=32, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
}


@pytest.fixture(params=FAMILIES)
def family_model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    """A random model of the family with the tiny model's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    end = tokenizer.eos_token_id
    config = FAMILIES[request.param](vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.train(False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_pair_answers_as_one_shard_does(cli: CommandLine, family_model: Path) -> None:
    cli.env["ORCHESTRATOR_MODEL__ID"] = str(family_model)
    report = cli.json("verify")
    assert report["ok"] is True
    assert report["compared"] >= 40
    assert report["identical"] == report["compared"]
    assert report["imports"]["hits"] == report["imports"]["needed"] > 30
