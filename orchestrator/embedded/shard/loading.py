"""A Hugging Face decoder from a folder, ready for paged attention; what cannot work is refused."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from orchestrator.errors import ConfigError

from . import attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""By the spec's name: the dtype of activations and KV; int8 weights compute on float32 ones."""
INT8 = "int8"
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_REFUSED = ("is_encoder_decoder", "vision_config", "audio_config")


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any
    tokenizer: Any
    dtype: torch.dtype
    quantization: str
    """`int8`, or empty."""
    layers: int
    kv_heads: int
    head_dim: int
    max_position: int
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x dtype bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def load(folder: Path, dtype_name: str) -> Loaded:
    """Weights and tokenizer of `folder`; ConfigError in one sentence for what this shard cannot serve."""
    try:
        dtype = DTYPES[dtype_name]
    except KeyError:
        raise ConfigError(f"The dtype {dtype_name!r} is not one of {', '.join(DTYPES)}.") from None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"The model folder {folder} has no config.json.")
    config = _checked_config(folder)
    attention.register()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The model in {folder} cannot be loaded: {_first_line(error)}") from error
    model.requires_grad_(False).train(False)
    eos_token_ids = _eos_ids(model, tokenizer)
    if dtype_name == INT8:
        model = _int8(model)
    heads = config.num_attention_heads
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        quantization=INT8 if dtype_name == INT8 else "",
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position=config.max_position_embeddings,
        eos_token_ids=eos_token_ids,
    )


def _checked_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = _first_line(error)
        raise ConfigError(f"The model in {folder} is not one transformers knows: {reason}") from error
    if (why := _refusal(config)) is not None:
        raise ConfigError(f"The model in {folder} {why}.")
    return config


def _refusal(config: Any) -> str | None:
    """What this shard cannot serve about a model, or None."""
    names = getattr(config, "architectures", None) or []
    if not any(name.endswith("ForCausalLM") for name in names):
        return f"is {', '.join(names) or 'of no known kind'}, not a decoder"
    for attribute in _REFUSED:
        if getattr(config, attribute, None):
            return f"has {attribute}: only text decoders are served"
    kinds = set(getattr(config, "layer_types", None) or []) - _LAYER_KINDS
    if kinds:
        return f"has layers of the kind {', '.join(sorted(kinds))}: only attention layers are served"
    if getattr(config, "kv_lora_rank", None):
        return "has compressed attention (MLA): only plain KV heads are served"
    return None


def _int8(model: Any) -> Any:
    """Weights of all linear layers as int8, activations quantized step by step (torch's dynamic scheme)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        quantize: Any = torch.ao.quantization.quantize_dynamic
        return quantize(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    ids = set(listed if isinstance(listed, list) else [listed])
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def rope_of(folder: Path) -> str:
    """The RoPE parameters of a config, as stable text for the fingerprint."""
    raw = json.loads((folder / "config.json").read_text())
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    return json.dumps({key: raw[key] for key in keys if key in raw}, sort_keys=True)


def tokenizer_hash(folder: Path) -> str:
    """16 hex digits over the tokenizer's files: equal text must become equal token ids."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
