"""How many parameters a decoder has, by the shapes in its `config.json`; no weights are looked at.

Counted: matrices of embeddings, attention, MLP and experts, with the biases and norms beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.kv_bytes import shape_of
from orchestrator.errors import ConfigError

TWO_MATRICES = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "RefinedWeb"}
    | {"RefinedWebModel", "mpt", "phi", "starcoder2"}
)
"""Types whose MLP goes up and down; all others have a gate besides."""

TIED = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "RefinedWeb", "RefinedWebModel", "mpt"}
    | {"starcoder2", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2"}
)
"""Types whose output layer is the embedding where their config does not say."""

BIASED = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "opt", "bloom", "phi", "starcoder2"})
"""Types with a bias at every matrix of a layer."""

BIASED_QKV = frozenset({"qwen2", "qwen2_moe"})
"""Types with one at the query, key and value projections."""

POSITIONS_LEARNED = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt"})

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "positions": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights, by how quantization treats them."""

    embedding: int
    """Token and position embeddings, and the output layer where it is not tied: never quantized."""
    matrices: int
    """Of attention, MLP and experts."""
    small: int
    """Norms and biases."""

    @property
    def total(self) -> int:
        return self.embedding + self.matrices + self.small


def parameters_of(config: Mapping[str, Any]) -> Parameters:
    """Of a decoder's parsed `config.json`; ConfigError when it does not tell enough."""
    text = config.get("text_config", config)
    kind = str(text.get("model_type", ""))
    shape = shape_of(config)
    hidden, vocabulary = number_in(text, "hidden"), text.get("vocab_size")
    if not (hidden and isinstance(vocabulary, int)):
        raise ConfigError("The model's config.json names no hidden size or no vocabulary.")
    tied = text.get("tie_word_embeddings", kind in TIED)
    embedding = vocabulary * hidden * (1 if tied else 2)
    if kind in POSITIONS_LEARNED:
        embedding += number_in(text, "positions") * hidden
    attention = _latent_attention(text, hidden) or _attention(text, hidden, shape.kv_heads, shape.head_dim)
    sparse = _sparse_layers(text, shape.layers)
    dense = _matrices(kind) * hidden * _inner(text, hidden)
    mlps = sparse * _experts(text, hidden) + (shape.layers - sparse) * dense
    small = shape.layers * _small(text, kind, hidden, shape.kv_heads * shape.head_dim) + hidden
    return Parameters(embedding, shape.layers * attention + mlps, small)


def _attention(text: Mapping[str, Any], hidden: int, kv_heads: int, head_dim: int) -> int:
    queries = number_in(text, "heads") * head_dim
    return 2 * hidden * queries + 2 * hidden * kv_heads * head_dim


def _latent_attention(text: Mapping[str, Any], hidden: int) -> int:
    """DeepSeek's: keys and values through a small latent; 0 for other models."""
    latent = text.get("kv_lora_rank")
    if not latent:
        return 0
    heads, rope = number_in(text, "heads"), text["qk_rope_head_dim"]
    plain, value, squeezed = text["qk_nope_head_dim"], text["v_head_dim"], text.get("q_lora_rank")
    query = heads * (plain + rope)
    queries = squeezed * (hidden + query) if squeezed else hidden * query
    keys_and_values = hidden * (latent + rope) + latent * heads * (plain + value)
    return int(queries + keys_and_values + heads * value * hidden)


def _matrices(kind: str) -> int:
    return 2 if kind in TWO_MATRICES else 3


def _inner(text: Mapping[str, Any], hidden: int) -> int:
    return number_in(text, "inner") or 4 * hidden


def _sparse_layers(text: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts in place of one MLP."""
    if not number_in(text, "experts"):
        return 0
    first, step = text.get("first_k_dense_replace", 0), text.get("decoder_sparse_step", 1)
    dense = set(text.get("mlp_only_layers") or ())
    return sum(1 for at in range(first, layers) if at not in dense and (at + 1) % step == 0)


def _experts(text: Mapping[str, Any], hidden: int) -> int:
    """Matrices of one layer of experts: the router, those that are chosen from, and the shared ones."""
    count, inner = number_in(text, "experts"), text.get("moe_intermediate_size") or _inner(text, hidden)
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * inner
    return int(hidden * count + 3 * hidden * (count * inner + shared))


def _small(text: Mapping[str, Any], kind: str, hidden: int, kv_width: int) -> int:
    """Norms and biases of one layer."""
    norms = (4 if kind in BIASED else 2) * hidden
    if kind in BIASED:
        return norms + 2 * hidden + hidden + 2 * kv_width + _inner(text, hidden)
    return norms + (hidden + 2 * kv_width if kind in BIASED_QKV else 0)


def number_in(text: Mapping[str, Any], what: str) -> int:
    """A count by any of its names, 0 where the config has none: `hidden`, `heads`, `inner`, `experts`."""
    for name in _NAMES[what]:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def inner_width(text: Mapping[str, Any]) -> int:
    """Of the MLP, or of one expert."""
    return text.get("moe_intermediate_size") or number_in(text, "inner") or 4 * number_in(text, "hidden")
