"""What a model needs on each GPU, estimated before launch: weights, a smallest KV cache, overhead.

An estimate, not a promise: TGI measures for itself at warmup.  It is there to refuse at once what
would fail after minutes of loading, so it errs to the small side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.kv_bytes import shape_of
from orchestrator.core.parameters import Parameters, inner_width, number_in, parameters_of

GIB = 1 << 30
WEIGHT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0}
ACTIVATION_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 4}
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 4, "fp8_e4m3fn": 1, "fp8_e5m2": 1}

GROUP_SCALES = 1.04
"""Weights of 4 bits in groups of 128 carry a scale of 16 bits and a zero of 4: (4 + 20/128) / 4."""

CONTEXT_BYTES = int(0.6 * GIB)
"""A CUDA context with its kernels, and the workspaces of cuBLAS and flashinfer."""

NCCL_BYTES = int(0.4 * GIB)
"""Buffers of a communicator, only with several ranks."""

USABLE_SHARE = 0.9
"""TGI leaves the rest of a GPU's memory alone (its TGI_WIGGLE_ROOM)."""

HIDDEN_COPIES = 6
"""Of a token's hidden state at once in a prefill: residual, norm, query, key and value, output."""
INNER_COPIES = 3
"""The gate, what goes up, and their product."""


@dataclass(frozen=True, slots=True)
class GpuNeed:
    """Bytes on each GPU of a shard."""

    weights_bytes: int
    kv_bytes: int
    """Of one request of the greatest allowed length."""
    overhead_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.overhead_bytes

    @property
    def needed_bytes(self) -> int:
        """Memory that the GPU must have for it: TGI does not take all."""
        return math.ceil(self.used_bytes / USABLE_SHARE)

    def __str__(self) -> str:
        weights, kv, rest = (gib(n) for n in (self.weights_bytes, self.kv_bytes, self.overhead_bytes))
        return f"{weights} of weights, {kv} of KV cache for one request of full length and {rest} of overhead"


@dataclass(frozen=True, slots=True)
class Load:
    """What a shard is launched with, as far as its memory is concerned."""

    dtype: str
    """float32, float16, bfloat16 or int8."""
    tp: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    kv_dtype: str = ""
    """Empty: that of the activations."""


def gpu_need(config: Mapping[str, Any], load: Load, weights_bytes: int | None = None) -> GpuNeed:
    """`weights_bytes`: of the safetensors files together, where they are known; else counted from `config`.

    ConfigError when config.json does not tell enough.
    """
    whole = weights_bytes if weights_bytes is not None else estimated_weights_bytes(config, load.dtype)
    return GpuNeed(math.ceil(whole / load.tp), _kv_bytes(config, load), _overhead_bytes(config, load))


def estimated_weights_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Of all weights together; a quantization that config.json names is followed."""
    counted = parameters_of(config)
    plain = WEIGHT_BYTES[dtype]
    return round(counted.matrices * _matrix_bytes(config, plain) + _unquantized(counted) * plain)


def smallest_tp(
    config: Mapping[str, Any], load: Load, memory_bytes: int, weights_bytes: int | None = None
) -> int | None:
    """The fewest GPUs of this memory that hold the model and divide its heads; None where 16 do not."""
    for ranks in (1, 2, 4, 8, 16):
        one = Load(load.dtype, ranks, load.max_total_tokens, load.max_batch_prefill_tokens, load.kv_dtype)
        fits = gpu_need(config, one, weights_bytes).needed_bytes <= memory_bytes
        if fits and split_problem(config, ranks) is None:
            return ranks
    return None


def split_problem(config: Mapping[str, Any], tp: int) -> str | None:
    """Why the heads cannot be split over `tp` ranks, in a sentence.

    A single KV head is copied to every rank.
    """
    heads, kv_heads = number_in(config.get("text_config", config), "heads"), shape_of(config).kv_heads
    if _splits(heads, kv_heads, tp):
        return None
    possible = [ranks for ranks in range(1, heads + 1) if _splits(heads, kv_heads, ranks)]
    nearest = min(possible, key=lambda ranks: abs(ranks - tp))
    return (
        f"The model's {heads} attention heads and {kv_heads} KV heads cannot be split over {tp} ranks; "
        f"the nearest tp is {nearest}."
    )


def _splits(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and (kv_heads == 1 or kv_heads % ranks == 0)


def gib(count: int) -> str:
    """Bytes for people: `13.5 GiB`."""
    return f"{count / GIB:.1f} GiB"


def _unquantized(counted: Parameters) -> int:
    return counted.embedding + counted.small


def _matrix_bytes(config: Mapping[str, Any], plain: float) -> float:
    """Bytes of one weight of a matrix."""
    told = config.get("quantization_config")
    if not isinstance(told, Mapping):
        return plain
    if "fp8" in str(told.get("quant_method", "")):
        return 1.0
    bits = told.get("bits", told.get("w_bit"))
    if not isinstance(bits, int) or bits > 8:
        return plain
    return bits / 8 * (GROUP_SCALES if bits < 8 else 1.0)


def _kv_bytes(config: Mapping[str, Any], load: Load) -> int:
    """With fewer KV heads than ranks each rank has one."""
    shape = shape_of(config)
    heads = max(1, shape.kv_heads // load.tp)
    element = KV_BYTES[load.kv_dtype or load.dtype]
    return 2 * shape.layers * heads * shape.head_dim * element * load.max_total_tokens


def _overhead_bytes(config: Mapping[str, Any], load: Load) -> int:
    text = config.get("text_config", config)
    width = HIDDEN_COPIES * number_in(text, "hidden") + INNER_COPIES * inner_width(text) // load.tp
    activations = width * ACTIVATION_BYTES[load.dtype] * load.max_batch_prefill_tokens
    return int(CONTEXT_BYTES + (NCCL_BYTES if load.tp > 1 else 0) + activations)
