"""Decoders of several families, tiny and random, against transformers' own generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orchestrator.embedded.shard.attention import KVPool
from orchestrator.embedded.shard.loading import load
from orchestrator.embedded.shard.model import TransformersModel
from orchestrator.embedded.shard.seam import Batch, Request, Sampling, Stopping
from orchestrator.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": 299,
    "bos_token_id": 298,
    "pad_token_id": 299,
}
PROMPT = tuple((7 * i * i + 3 * i) % 290 for i in range(23))
NEW_TOKENS = 12

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen2 with some sliding layers": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        tie_word_embeddings=False,
        head_dim=8,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, tie_word_embeddings=False, head_dim=8, sliding_window=8
    ),
    "granite": lambda: transformers.GraniteConfig(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    ),
}


def saved(folder: Path, tokenizer_from: Path, config: Any) -> Any:
    """A random model of the config in `folder`, with the tiny model's tokenizer; the model itself."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train(False).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return model


async def served(folder: Path, *, dtype: str = "float32", chunk_len: int = 0) -> list[int]:
    loaded = load(folder, dtype)
    pool = KVPool.create(
        layers=loaded.layers,
        blocks=64,
        block_size=4,
        kv_heads=loaded.kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )
    model = TransformersModel(loaded, pool, None, threads=1, chunk_tokens=chunk_len)
    slots = tuple(range(len(PROMPT) + NEW_TOKENS))
    stopping = Stopping(NEW_TOKENS, ignore_eos_token=True)
    request = Request(1, "", PROMPT, Sampling(), stopping, slots, chunk_len=chunk_len)
    try:
        await model.warmup()
        out, cached = await model.prefill(Batch(1, (request,)))
        while cached is not None:
            more, cached = await model.decode([cached])
            out += more
    finally:
        model.close()
    return [generation.token.id for generation in out]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_generates_what_transformers_generates(
    tmp_path: Path, tiny_model: Path, family: str
) -> None:
    model = saved(tmp_path, tiny_model, FAMILIES[family]())
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    wanted = out[0, len(PROMPT) :].tolist()
    assert len(set(wanted)) > 3, "a model that repeats one token would prove nothing"
    assert await served(tmp_path) == wanted
    assert await served(tmp_path, chunk_len=5) == wanted


async def test_the_window_matters_in_the_sliding_models(tmp_path: Path, tiny_model: Path) -> None:
    wide = saved(tmp_path / "wide", tiny_model, transformers.MistralConfig(**SIZES, sliding_window=None))
    saved(tmp_path / "narrow", tiny_model, transformers.MistralConfig(**SIZES, sliding_window=8))
    assert wide is not None
    assert await served(tmp_path / "wide") != await served(tmp_path / "narrow")


async def test_int8_stays_close_to_float32(tmp_path: Path, tiny_model: Path) -> None:
    saved(tmp_path, tiny_model, transformers.LlamaConfig(**SIZES))
    loaded = load(tmp_path, "int8")
    assert loaded.quantization == "int8"
    assert loaded.dtype is torch.float32
    assert len(await served(tmp_path, dtype="int8")) == NEW_TOKENS


OTHERS: dict[str, Callable[[], Any]] = {
    "is BertModel, not a decoder": lambda: transformers.BertConfig(architectures=["BertModel"]),
    "T5ForConditionalGeneration, not a decoder": lambda: transformers.T5Config(
        architectures=["T5ForConditionalGeneration"]
    ),
    "only attention layers are served": lambda: transformers.MambaConfig(architectures=["MambaForCausalLM"]),
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, sentence: str) -> None:
    OTHERS[sentence]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path, "float32")


def test_a_missing_folder_and_an_unknown_dtype_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="has no config"):
        load(tmp_path / "nowhere", "float32")
    with pytest.raises(ConfigError, match="'float8' is not one of"):
        load(tiny_model, "float8")
