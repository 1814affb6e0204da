"""KV arithmetic against figures worked out by hand and published ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.kv_bytes import ModelShape, bytes_per_token, ring_bytes, shape_of
from orchestrator.errors import ConfigError

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}


def test_grouped_query_models_count_kv_heads_and_not_query_heads() -> None:
    assert shape_of(SMOLLM2) == ModelShape(layers=30, kv_heads=3, head_dim=64, max_positions=8192)


def test_an_explicit_head_dim_wins_over_the_quotient() -> None:
    assert shape_of({**SMOLLM2, "head_dim": 128}).head_dim == 128


def test_older_names_and_models_without_kv_heads_are_understood() -> None:
    assert shape_of(GPT2) == ModelShape(layers=12, kv_heads=12, head_dim=64, max_positions=1024)


def test_multi_query_models_have_one_kv_head() -> None:
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert shape_of(falcon) == ModelShape(layers=32, kv_heads=1, head_dim=64, max_positions=None)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "kib"),
    [(64, 72, 128, 2304), (96, 96, 128, 4608), (80, 8, 128, 320), (32, 8, 128, 128)],
    ids=["OPT-66B", "OPT-175B", "Llama-2-70B", "Llama-3.1-8B"],
)
def test_bytes_per_token_of_known_models_in_fp16(layers: int, kv_heads: int, head_dim: int, kib: int) -> None:
    assert bytes_per_token(ModelShape(layers, kv_heads, head_dim, None), "float16") == kib * 1024


def test_fp32_takes_twice_the_bytes_of_bf16() -> None:
    shape = shape_of(SMOLLM2)
    assert (bytes_per_token(shape, "float32"), bytes_per_token(shape, "bfloat16")) == (46_080, 23_040)


@given(token_bytes=st.integers(64, 5_000_000), tokens=st.integers(1, 10_000))
def test_a_quarter_of_the_ring_holds_the_longest_prompt_with_its_token_ids_and_checksums(
    token_bytes: int, tokens: int
) -> None:
    kv = token_bytes * tokens
    checksums_and_ids = 4 * tokens + 8 * (kv // (256 * 1024) + 1) + 64
    ring = ring_bytes(token_bytes, tokens)
    assert ring // 4 >= kv + checksums_and_ids
    assert ring % 2**20 == 0
    assert ring <= 4 * kv * 1.02 + 4 * 2**20


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no layers"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "neither head_dim nor a hidden size"),
    ],
)
def test_a_config_without_a_shape_is_refused_in_one_sentence(config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(config)
