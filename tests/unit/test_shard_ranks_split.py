"""Weights cut over ranks: the parts together compute what the whole model does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from orchestrator.embedded.shard.attention import KVPool, Span, Step
from orchestrator.embedded.shard.loading import Loaded, load
from orchestrator.embedded.shard.ranks.group import Group
from orchestrator.embedded.shard.ranks.split import check_split, split
from orchestrator.embedded.shard.seam import always
from orchestrator.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
IDS = tuple((7 * i * i + 3 * i) % 120 for i in range(11))

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    ),
}


def saved(folder: Path, tokenizer_from: Path, config: Any) -> Path:
    """A random model of the config; biases and norms, which begin as zeros and ones, are random too."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(9)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return folder


def logits(loaded: Loaded) -> tuple[Tensor, KVPool]:
    """Of the last of IDS, [vocab], and the KV that they left."""
    pool = KVPool.create(
        layers=loaded.layers,
        blocks=1,
        block_size=len(IDS),
        kv_heads=loaded.kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )
    slots = torch.arange(len(IDS))
    step = Step(pool, [Span(len(IDS), len(IDS), slots, 0)], slots, 0, always)
    with torch.inference_mode():
        out = loaded.model(
            input_ids=torch.tensor([IDS]), position_ids=slots[None], use_cache=False, paged_step=step
        )
    return out.logits[0, -1], pool


@pytest.mark.parametrize("family", FAMILIES)
def test_two_halves_of_a_model_have_its_logits_and_its_kv(
    tmp_path: Path, tiny_model: Path, family: str
) -> None:
    folder = saved(tmp_path / "model", tiny_model, FAMILIES[family]())
    whole = load(folder, "float32")
    wanted, kv = logits(whole)

    # One after the other: transformers does not load two models at once in one process.
    copies = [load(folder, "float32") for _ in range(2)]

    def part(rank: int) -> tuple[Tensor, KVPool]:
        loaded = copies[rank]
        check_split(loaded, 2)
        group = Group(str(tmp_path / "meeting"), rank, 2, join_deadline_s=10)
        own = split(loaded, rank, 2, group.add)
        assert own.kv_heads * 2 == whole.kv_heads == loaded.kv_heads
        return logits(own)

    with ThreadPoolExecutor(2) as pool:
        (first, first_kv), (second, second_kv) = pool.map(part, range(2))
    assert torch.equal(first, second), "ranks that differ in one bit could choose different tokens"
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-4)
    for layer in range(2):
        for whole_kv, parts in zip(
            kv.layers[layer], zip(first_kv.layers[layer], second_kv.layers[layer], strict=True), strict=True
        ):
            torch.testing.assert_close(torch.cat(parts, dim=2), whole_kv, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_part_of_every_layer_and_no_more(tmp_path: Path, tiny_model: Path) -> None:
    folder = saved(tmp_path / "model", tiny_model, FAMILIES["llama with biases"]())
    whole = load(folder, "float32").model.model.layers[1]
    own = split(load(folder, "float32"), 1, 2, lambda _: None).model.model.layers[1]
    assert torch.equal(own.self_attn.k_proj.weight, whole.self_attn.k_proj.weight[8:])
    assert torch.equal(own.self_attn.q_proj.bias, whole.self_attn.q_proj.bias[16:])
    assert torch.equal(own.self_attn.o_proj.weight, whole.self_attn.o_proj.weight[:, 16:])
    assert torch.equal(own.mlp.down_proj.weight, whole.mlp.down_proj.weight[:, 24:])
    assert torch.equal(own.mlp.down_proj.bias, whole.mlp.down_proj.bias)
    for module in (own.self_attn.k_proj, own.self_attn.o_proj, own.mlp.up_proj):
        assert module.weight.untyped_storage().nbytes() == module.weight.nbytes, "the whole is still held"


REFUSED: dict[str, tuple[Callable[[], Any], int]] = {
    r"2 KV heads cannot be split over 4 ranks": (FAMILIES["llama"], 4),
    r"50 features of layers\.0\.mlp\.gate_proj cannot be split over 4 ranks": (
        lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4, "intermediate_size": 50}),
        4,
    ),
    r"A Olmo2ForCausalLM is split by colwise_gather_output, rowwise_split_input": (
        lambda: transformers.Olmo2Config(**SIZES),
        2,
    ),
    r"has no plan to split a OPTForCausalLM": (
        lambda: transformers.OPTConfig(
            vocab_size=120,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
        2,
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_split_is_refused_in_a_sentence(
    tmp_path: Path, tiny_model: Path, sentence: str
) -> None:
    config, ranks = REFUSED[sentence]
    loaded = load(saved(tmp_path, tiny_model, config()), "float32")
    with pytest.raises(ConfigError, match=sentence):
        check_split(loaded, ranks)


def test_int8_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="int8 weights are not split over ranks"):
        check_split(load(tiny_model, "int8"), 2)
