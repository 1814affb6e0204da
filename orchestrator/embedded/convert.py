"""`python -m orchestrator.embedded.convert GGUF FOLDER`: SmolLM2 from GGUF to safetensors in fp32.

GGUF keeps less of a tokenizer than the original has; what it loses is put back here, and checked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
END_OF_TURN = "<|im_end|>"
END_OF_TURN_ID = 2


def main(arguments: list[str]) -> None:
    gguf, target = (Path(argument) for argument in arguments)
    with gguf.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            sys.exit("what the package holds is not a GGUF file")
    # The file is local; nothing may be asked of the hub.  Read when transformers is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = convert_weights(gguf, target)
    convert_tokenizer(gguf, target, config.max_position_embeddings)
    check(target)
    for path in target.iterdir():
        path.chmod(0o644)  # weights are saved for their owner only, but a container has another user


def convert_weights(gguf: Path, target: Path) -> Any:
    """Dequantize to float32 and save as safetensors without any mark of the quantization."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, mark):
            delattr(model, mark)
    del model.config.quantization_config
    model.generation_config.eos_token_id = END_OF_TURN_ID
    model.save_pretrained(target)
    # TGI's transformers (version 4) looks for RoPE's base here.
    theta = model.config.rope_parameters["rope_theta"]
    update_json(target / "config.json", rope_theta=theta, eos_token_id=END_OF_TURN_ID)
    return model.config


def convert_tokenizer(gguf: Path, target: Path, positions: int) -> None:
    """Keep vocabulary, merges and chat template; put back the end token and the splitting of digits."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = END_OF_TURN
    tokenizer.model_max_length = positions
    # The original splits numbers into digits before byte-level BPE; GGUF only names that ("smollm").
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)
    # A class name that transformers 4 knows as well.
    update_json(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def update_json(path: Path, **values: Any) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(raw | values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check(target: Path) -> None:
    """SystemExit with a sentence unless the saved tokenizer does what the original does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.eos_token_id != END_OF_TURN_ID:
        sys.exit(f"The end token is {tokenizer.eos_token_id} instead of {END_OF_TURN_ID}.")
    if tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id:
        sys.exit("The tokenizer prepends a begin token, which the original does not.")
    if not tokenizer.chat_template:
        sys.exit("The tokenizer has lost its chat template.")


if __name__ == "__main__":
    main(sys.argv[1:])
