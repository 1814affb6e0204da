"""What transformers answers, with the same weights and none of TGI's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Reference:
    """A decoder in float32, with a LoRA adapter merged into its weights where one is named."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        torch.set_num_threads(1)  # the servers of a test keep the other cores busy
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if adapter is not None:
            _merge(self._model, load_file(adapter / "adapter_model.safetensors"))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    @torch.no_grad()
    def greedy(self, text: str, new_tokens: int) -> list[int]:
        """The likeliest token, `new_tokens` times; an end token does not end it.  No KV cache is involved."""
        ids = self.ids(text)
        for _ in range(new_tokens):
            logits = self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[-new_tokens:]


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random LoRA adapter on the attention of `model`, as peft saves one."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(ATTENTION),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in _attention_shapes(model).items():
        at = f"base_model.model.{name}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, inputs, generator=random) / inputs**0.5
        tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, RANK, generator=random) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _attention_shapes(model: Path) -> dict[str, tuple[int, int]]:
    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = (heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads)
    return {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in zip(ATTENTION, shapes, strict=True)
    }


def _merge(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            at = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(at).weight.data += ALPHA / RANK * (up @ down)
