"""Shared fixtures.  Nothing heavy is imported until a test asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
END_SHARE = 45.0
"""Logit given to the end token: it then ends about one sampled answer in ten, and no greedy one at once."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "the ship left the harbour before the sun rose and the harbour was quiet",
    "one two three four five six seven eight nine ten",
    "def add(first, second): return first + second",
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 2 layers: seeded, ASCII answers, KV that matters, 4096 positions."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    build_tiny_model(folder)
    return folder


def build_tiny_model(folder: Path) -> None:
    """Write the model, a byte-level tokenizer of about 400 tokens and a chat template into `folder`."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    _model(tokenizer).save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        additional_special_tokens=["<|im_start|>", END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(20)
        model: Any = LlamaForCausalLM(config)
        model.eval()
        _bias_logits(model, tokenizer)
    return model


def _bias_logits(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Llama has no output bias: keep hidden feature 0 constant through all layers and read it as one.

    Tokens that are not printable ASCII become impossible, and the end token likely enough to be found.
    """
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    for token_id in range(len(tokenizer)):
        text = str(tokenizer.decode([token_id]))
        wanted = text.isascii() and text.isprintable() and not text.startswith("<|")
        model.lm_head.weight[token_id, 0] = 0.0 if wanted else -2000.0
    model.lm_head.weight[tokenizer.eos_token_id, 0] = END_SHARE
