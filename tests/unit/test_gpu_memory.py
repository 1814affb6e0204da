"""Sizes of models against published ones, and what a shard of them needs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.gpu_memory import (
    GIB,
    GpuNeed,
    Load,
    estimated_weights_bytes,
    gpu_need,
    smallest_tp,
    split_problem,
)
from orchestrator.core.parameters import parameters_of
from orchestrator.errors import ConfigError


def llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA_2_7B = llama(32, 4096, 11008, 32, 32, 32000)
LLAMA_2_70B = llama(80, 8192, 28672, 64, 8, 32000)
LLAMA_3_8B = llama(32, 4096, 14336, 32, 8, 128256)
SMOLLM2 = llama(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True)
MIXTRAL = llama(32, 4096, 14336, 32, 8, 32000, model_type="mixtral", num_local_experts=8)
QWEN2_7B = llama(28, 3584, 18944, 28, 4, 152064, model_type="qwen2")
QWEN3_30B_A3B = llama(
    48,
    2048,
    6144,
    32,
    4,
    151936,
    model_type="qwen3_moe",
    num_experts=128,
    moe_intermediate_size=768,
    head_dim=128,
)
QWEN2_MOE = llama(
    24, 2048, 5632, 16, 16, 151936, model_type="qwen2_moe", num_experts=60, moe_intermediate_size=1408
) | {"shared_expert_intermediate_size": 5632}
GEMMA_2_9B = llama(42, 3584, 14336, 16, 8, 256000, model_type="gemma2", head_dim=256)
del GEMMA_2_9B["tie_word_embeddings"]
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT_13B = {
    "model_type": "opt",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_attention_heads": 40,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "multi_query": True,
    "vocab_size": 65024,
}
DEEPSEEK_V2_LITE = llama(27, 2048, 10944, 16, 16, 102400, model_type="deepseek_v2") | {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_2_70B, 68_976_648_192),
        (MIXTRAL, 46_702_792_704),
        (SMOLLM2, 134_515_008),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN2_MOE, 14_315_784_192),
        (GEMMA_2_9B, 9_241_705_984),
        (GPT2, 124_439_808),
        (OPT_13B, 12_853_473_280),
        (FALCON_7B, 6_921_720_704),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
    ],
    ids=[
        "Llama-2-7B",
        "Llama-3.1-8B",
        "Llama-2-70B",
        "Mixtral-8x7B",
        "SmolLM2-135M",
        "Qwen2.5-7B",
        "Qwen3-30B-A3B",
        "Qwen1.5-MoE-A2.7B",
        "Gemma-2-9B",
        "GPT-2",
        "OPT-13B",
        "Falcon-7B",
        "DeepSeek-V2-Lite",
    ],
)
def test_parameters_are_those_of_the_published_weights(config: dict[str, Any], published: int) -> None:
    assert parameters_of(config).total == pytest.approx(published, rel=0.001)


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [(LLAMA_2_7B, 13.5), (LLAMA_3_8B, 16.1), (LLAMA_2_70B, 138), (MIXTRAL, 93), (SMOLLM2, 0.27)],
    ids=["Llama-2-7B", "Llama-3.1-8B", "Llama-2-70B", "Mixtral-8x7B", "SmolLM2-135M"],
)
def test_weights_are_as_large_as_the_published_files(config: dict[str, Any], gigabytes: float) -> None:
    assert estimated_weights_bytes(config, "bfloat16") / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_four_bit_weights_with_their_scales_are_as_large_as_the_published_file() -> None:
    awq = {**LLAMA_2_7B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert estimated_weights_bytes(awq, "float16") / 1e9 == pytest.approx(3.89, rel=0.01)


def test_fp8_halves_the_matrices_and_leaves_the_embeddings() -> None:
    fp8 = {**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}}
    embeddings = 2 * 128256 * 4096 * 2
    matrices = 2 * 8_030_261_248 - embeddings
    assert estimated_weights_bytes(fp8, "bfloat16") == pytest.approx(embeddings + matrices / 2, rel=0.001)


def test_the_text_part_of_a_larger_model_is_read() -> None:
    assert parameters_of({"text_config": LLAMA_2_7B}) == parameters_of(LLAMA_2_7B)


def test_a_config_that_tells_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden size or no vocabulary"):
        parameters_of({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8})


LOAD = Load("float16", 1, 4096, 4096)


def test_llama_2_7b_on_one_gpu_is_the_sum_of_its_parts() -> None:
    need = gpu_need(LLAMA_2_7B, LOAD)
    assert need.weights_bytes == 2 * 6_738_415_616
    assert need.kv_bytes == 2 * GIB  # 512 KiB per token
    # 0.6 GiB of context, and (6 x 4096 + 3 x 11008) x 2 bytes for each of 4096 tokens
    assert need.overhead_bytes == int(0.6 * GIB) + 57600 * 2 * 4096
    assert need.needed_bytes == pytest.approx((13_476_831_232 + 2 * GIB + need.overhead_bytes) / 0.9, abs=2)


def test_with_tensor_parallelism_weights_and_kv_are_divided_and_nccl_is_added() -> None:
    one, four = gpu_need(LLAMA_2_70B, LOAD), gpu_need(LLAMA_2_70B, Load("float16", 4, 4096, 4096))
    assert four.weights_bytes == one.weights_bytes // 4
    assert four.kv_bytes == one.kv_bytes // 4 == 320 * 1024 * 4096 // 4
    width = 6 * 8192 + 3 * 28672 // 4
    assert four.overhead_bytes == int(0.6 * GIB) + int(0.4 * GIB) + width * 2 * 4096


def test_a_single_kv_head_is_on_every_rank() -> None:
    per_token = 2 * 32 * 64 * 2
    for ranks in (1, 71):
        assert gpu_need(FALCON_7B, Load("float16", ranks, 1000, 1000)).kv_bytes == 1000 * per_token


def test_known_files_go_before_the_estimate_and_an_fp8_cache_is_half_as_large() -> None:
    need = gpu_need(LLAMA_2_7B, Load("float16", 1, 4096, 4096, "fp8_e5m2"), weights_bytes=7_000_000_000)
    assert need.weights_bytes == 7_000_000_000
    assert need.kv_bytes == GIB


def test_the_parts_are_told_in_words() -> None:
    assert str(GpuNeed(GIB, GIB // 2, GIB)) == (
        "1.0 GiB of weights, 0.5 GiB of KV cache for one request of full length and 1.0 GiB of overhead"
    )


@pytest.mark.parametrize(
    ("config", "memory_gib", "ranks"),
    [
        (LLAMA_2_7B, 24, 1),
        (LLAMA_2_70B, 80, 2),
        (LLAMA_2_70B, 40, 4),
        (LLAMA_2_70B, 16, None),
        (QWEN2_7B, 8, 4),
    ],
)
def test_the_fewest_gpus_that_hold_a_model(
    config: dict[str, Any], memory_gib: int, ranks: int | None
) -> None:
    assert smallest_tp(config, LOAD, memory_gib * GIB) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_that_divide_are_no_problem(ranks: int) -> None:
    assert split_problem(LLAMA_3_8B, ranks) is None


def test_heads_that_do_not_divide_are_told_with_the_nearest_that_do() -> None:
    assert split_problem(LLAMA_3_8B, 6) == (
        "The model's 32 attention heads and 8 KV heads cannot be split over 6 ranks; the nearest tp is 4."
    )
    assert split_problem(LLAMA_3_8B, 16) is not None
    assert split_problem(FALCON_7B, 2) == (
        "The model's 71 attention heads and 1 KV heads cannot be split over 2 ranks; the nearest tp is 1."
    )


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 100_000), st.integers(1, 100_000))
def test_needs_grow_with_lengths_and_shrink_with_ranks(ranks: int, total: int, prefill: int) -> None:
    need = gpu_need(LLAMA_3_8B, Load("float16", ranks, total, prefill))
    assert need.used_bytes < need.needed_bytes
    assert gpu_need(LLAMA_3_8B, Load("float16", ranks, total + 1, prefill)).used_bytes > need.used_bytes
    assert gpu_need(LLAMA_3_8B, Load("float16", ranks, total, prefill + 1)).used_bytes > need.used_bytes
    wider = gpu_need(LLAMA_3_8B, Load("float16", ranks * 2, total, prefill)) if ranks < 8 else need
    assert wider.weights_bytes <= need.weights_bytes
