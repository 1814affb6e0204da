"""KV cache arithmetic: bytes per token, and the ring that lets every allowed prompt travel.

`kv_bytes = 2 x layers x kv_heads x head_dim x dtype_bytes x tokens` (key and value, KV heads and
not query heads).  Pure: takes the parsed `config.json` of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 4}
"""Of one KV element; int8 weights keep their KV in float32."""

RECORDS_PER_RING = 4
"""One record may take a quarter of the ring, so this many of the longest prompt must fit."""

RECORD_OVERHEAD = 1 / 64
"""Beside its KV a record holds token ids, checksums and alignment: well under this share."""

RING_GRAIN_BYTES = 1 << 20
HEADER_BYTES = 1 << 20
"""Room for an arena's header and index."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a model's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    """The longest sequence the model was made for, tokens; None when its config does not say."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a decoder's parsed `config.json`; ConfigError when it does not tell."""
    text = config.get("text_config", config)
    layers, heads = _number(text, "layers"), _number(text, "heads")
    if layers is None or heads is None:
        raise ConfigError("The model's config.json names no layers or no attention heads.")
    head_dim = text.get("head_dim") or (_number(text, "hidden") or 0) // heads
    if head_dim <= 0:
        raise ConfigError("The model's config.json names neither head_dim nor a hidden size.")
    return ModelShape(layers, _kv_heads(text, heads), head_dim, _number(text, "positions"))


def bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """KV bytes of one token over all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def ring_bytes(token_bytes: int, max_input_tokens: int) -> int:
    """Bytes of a ring whose quarter holds the record of the longest allowed prompt, in whole MiB."""
    record = token_bytes * max_input_tokens
    record += int(record * RECORD_OVERHEAD) + 4096
    needed = HEADER_BYTES + RECORDS_PER_RING * record
    return -(-needed // RING_GRAIN_BYTES) * RING_GRAIN_BYTES


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _number(text, "kv_heads") or heads


def _number(text: Mapping[str, Any], what: str) -> int | None:
    for name in _NAMES[what]:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None
