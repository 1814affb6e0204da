"""A model that TGI has no layers for: transformers' own modules on TGI's paged KV, in float16."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Sampling, Stopping
from tests.tgi.features import SMALL_CACHE, same
from tests.tgi.pair import Trio, tokens, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers

NEW_TOKENS = 8
TEXTS = (
    "one two three four",
    "the ship left the harbour before the sun rose " * 3,
    "ten",
    "seven eight " * 40,
)


@pytest.fixture(scope="module")
def olmo(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OLMo 2 of two layers with the tokenizer of `tiny`."""
    folder = tmp_path_factory.mktemp("olmo") / "tiny-olmo2"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    _write_olmo(folder)
    return folder


def _write_olmo(folder: Path) -> None:
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM

    tokenizer = tokenizer_of(folder)
    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(21)
        Olmo2ForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def pair(servers: Servers, olmo: Path, tgi_python: Path) -> Iterator[Trio]:
    """Where the command line names no dtype this class takes float16."""
    with trio(servers, ServerPlan(olmo, env=SMALL_CACHE), tgi_python) as started:
        yield started
        assert [member.report.faults for member in (started.put, started.get)] == [0, 0]


async def test_it_is_hooked_and_answers_as_a_stock_server(pair: Trio, olmo: Path) -> None:
    tokenizer = tokenizer_of(olmo)
    async with pair.models() as models:
        answered = set()
        for text in TEXTS:
            prompt = prompt_of(tokenizer, text)
            for sampling in (Sampling(), Sampling(do_sample=True, temperature=0.8, seed=4)):
                asked = models.ask(prompt, Stopping(NEW_TOKENS), sampling=sampling, top_n_tokens=2)
                answered.add(tuple(tokens(await same(models, asked))))
        assert len(answered) > len(TEXTS)
        for member in (pair.put, pair.get):
            report = member.report
            assert (report.model_class, report.hooked) == ("TransformersFlashCausalLM", True)
            assert report.fingerprint is not None
            assert (report.fingerprint.dtype, report.fingerprint.kv_dtype) == ("float16", "float16")
