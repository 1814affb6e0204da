"""What a loaded TGI model is, as a Fingerprint: everything that decides whether two servers' KV fit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_patches.contract import Fingerprint, ShardSpec

_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings")
_CALL_STATE = frozenset({"truncation", "padding"})
_ROPE_VARIABLES = ("ROPE_SCALING", "ROPE_FACTOR")


@dataclass(frozen=True, slots=True)
class KVShape:
    """Of one rank's cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: int
    """All layers, K and V."""
    tokens: int
    """That the cache holds; 0 where it grows with the requests."""


def fingerprint_of(
    model: Any, spec: ShardSpec, shape: KVShape, attention: str, block_size: int
) -> Fingerprint:
    """`model` is TGI's; adapters are those that TGI loaded beside it."""
    return Fingerprint(
        model=spec.model_name,
        revision=spec.revision,
        tokenizer=tokenizer_hash(model.tokenizer),
        dtype=name_of(model.dtype),
        kv_dtype=shape.dtype,
        layers=shape.layers,
        kv_heads=_all_heads(model, shape),
        head_dim=shape.head_dim,
        quantization=getattr(model, "quantize", None) or "",
        rope=rope_of(getattr(model.model, "config", None) or getattr(model, "config", None), os.environ),
        adapters=adapters_of(os.environ),
        attention=attention,
        block_size=block_size,
        tensor_parallel=model.world_size,
    )


def _all_heads(model: Any, shape: KVShape) -> int:
    """Of all ranks; a single KV head is on every one of them."""
    config = getattr(model, "config", None)
    alone = getattr(config, "num_key_value_heads", None) == 1
    return 1 if alone else shape.kv_heads * model.world_size


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hex digits over a fast tokenizer's definition, or over a slow one's vocabulary.

    Without truncation and padding, which are what the last call asked for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    text = json.dumps({key: value for key, value in whole.items() if key not in _CALL_STATE}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rope_of(config: Any, env: Mapping[str, str]) -> str:
    """Position settings of the model, and TGI's overrides of them."""
    values = {key: getattr(config, key, None) for key in _ROPE_KEYS}
    values |= {name: env.get(name) for name in _ROPE_VARIABLES}
    return json.dumps({key: value for key, value in values.items() if value is not None}, sort_keys=True)


def adapters_of(env: Mapping[str, str]) -> str:
    """TGI's LORA_ADAPTERS, in one order."""
    return ",".join(sorted(filter(None, (name.strip() for name in env.get("LORA_ADAPTERS", "").split(",")))))
