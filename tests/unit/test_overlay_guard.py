"""Whether a server is hooked at all: known sources, models that can be relayed, what the model is."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tgi_patches.contract import Role, ShardSpec
from tgi_patches.hooks import guard
from tgi_patches.hooks.identity import KVShape, adapters_of, fingerprint_of, rope_of, tokenizer_hash
from tgi_patches.hooks.support import Served, heads_first, refusal
from tgi_patches.hooks.wrap import wrap

# --- sources ---

PLAIN = '''\
def plain(a, b=1):
    """Says what it does."""
    return a + b
'''
TRACED = """\
@traced("name")
def decorated(a):
    return a
"""
METHOD = """\
    def method(self):
        return 1
"""
CLASS_METHOD = """\
    @classmethod
    @traced("from_pb")
    def from_pb(cls, pb):
        return cls()
"""
SOURCE = f"""\
from functools import wraps


def traced(name):
    def decorate(function):
        @wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    return decorate


{PLAIN}

{TRACED}

class Batch:
{METHOD}
{CLASS_METHOD}
"""

Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes a module of a name and a source; gone with the test."""
    monkeypatch.syspath_prepend(tmp_path)
    loaded: list[str] = []

    def make(name: str, source: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        loaded.append(name)
        return importlib.import_module(name)

    yield make
    for name in loaded:
        sys.modules.pop(name, None)


def digest(source: str) -> str:
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


SOURCES = {
    "plain": PLAIN,
    "decorated": TRACED,
    "Batch.method": METHOD,
    "Batch.from_pb": CLASS_METHOD,
}


def attribute(module: ModuleType, path: str) -> Any:
    owner: Any = module
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


@pytest.mark.parametrize("path", SOURCES)
def test_a_function_is_known_by_its_source_and_its_decorators(path: str, load: Load) -> None:
    module = load("overlay_guard_sources", SOURCE)
    assert guard.source_hash(attribute(module, path)) == digest(SOURCES[path])


@pytest.mark.parametrize("path", SOURCES)
def test_a_function_that_was_wrapped_is_still_known(path: str, load: Load) -> None:
    module = load("overlay_guard_wrapped", SOURCE)
    owner, _, name = path.rpartition(".")
    wrap(attribute(module, owner) if owner else module, name, lambda original, *rest: original(*rest))
    assert guard.source_hash(attribute(module, path)) == digest(SOURCES[path])


def known(module: str) -> dict[str, tuple[str, ...]]:
    return {f"{module}:{path}": ("0" * 16, digest(source)) for path, source in SOURCES.items()}


def test_sources_of_any_known_version_are_no_difference(load: Load) -> None:
    load("overlay_guard_same", SOURCE)
    assert guard.differences(known("overlay_guard_same")) == []


def test_every_function_that_changed_is_named(load: Load) -> None:
    changed = SOURCE.replace("return cls()", "return cls(  )").replace(
        '@traced("name")\n', "@traced('name')\n"
    )
    load("overlay_guard_changed", changed)
    assert guard.differences(known("overlay_guard_changed")) == [
        "overlay_guard_changed:decorated",
        "overlay_guard_changed:Batch.from_pb",
    ]


def test_what_is_not_there_is_a_difference(load: Load) -> None:
    load("overlay_guard_absent", "class Batch:\n    size = 3\n")
    missing = [
        "overlay_guard_absent:plain",
        "overlay_guard_absent:Batch.filter",
        "overlay_guard_absent:Batch.size",
        "overlay_guard_no_such_module:plain",
        "overlay_guard_absent.no_package:plain",
    ]
    assert guard.differences(dict.fromkeys(missing, ("0" * 16,))) == missing


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.n:A.b"], "A.b differ from v3.3.7."),
        (["m:A", "m:B", "m:C"], "A, B, C differ from v3.3.7."),
        (["m:A", "m:B", "m:C", "m:D", "m:E"], "A, B, C and 2 more differ from v3.3.7."),
    ],
)
def test_the_sentence_names_three_at_most(names: list[str], expected: str) -> None:
    assert guard.sentence(names) == f"This TGI is not one that the overlay was tested with: {expected}"


# --- models ---


def served(model_class: str, batch_class: str, attention: str = "flashinfer", device: str = "cuda") -> Served:
    return Served(model_class, batch_class, attention, device)


FLASH = ("FlashCausalLM", "FlashCausalLMBatch")


@pytest.mark.parametrize(
    ("model", "heads_before_tokens"),
    [
        (served(*FLASH, "flashinfer", "cuda"), False),
        (served(*FLASH, "flashdecoding", "cuda"), False),
        (served(*FLASH, "flashdecoding-ipex", "xpu"), False),
        (served(*FLASH, "flashdecoding-ipex", "cpu"), True),
        (served("TransformersFlashCausalLM", "FlashCausalLMBatch"), False),
        (served("CausalLM", "CausalLMBatch", "paged", "cpu"), False),
    ],
)
def test_text_decoders_are_hooked(model: Served, heads_before_tokens: bool) -> None:
    assert refusal(model) is None
    assert heads_first(model.attention, model.device) is heads_before_tokens


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (served("VlmCausalLM", "VlmCausalLMBatch"), "class VlmCausalLM "),
        (served("MllamaCausalLM", "MllamaCausalLMBatch"), "class MllamaCausalLM "),
        (served("TransformersFlashVlmCausalLM", "VlmCausalLMBatch"), "class TransformersFlashVlmCausalLM "),
        (served("IdeficsCausalLM", "IdeficsCausalLMBatch"), "class IdeficsCausalLM "),
        (served("Seq2SeqLM", "Seq2SeqLMBatch"), "class Seq2SeqLM "),
        (served("Mamba", "MambaBatch"), "class Mamba "),
        (served("CausalLM", "BloomCausalLMBatch"), "batch class BloomCausalLMBatch "),
        (served("CausalLM", "GalacticaCausalLMBatch"), "batch class GalacticaCausalLMBatch "),
        (served(*FLASH, "paged", "cuda"), "ATTENTION to flashinfer or flashdecoding"),
        (served(*FLASH, "paged", "cpu"), "under paged attention"),
        (served(*FLASH, "flashinfer", "cpu"), "attention flashinfer on cpu"),
        (served(*FLASH, "flashdecoding", "xpu"), "attention flashdecoding on xpu"),
        (served(*FLASH, "flashdecoding-ipex", "cuda"), "attention flashdecoding-ipex on cuda"),
        (served(*FLASH, "flashdecoding", "hpu"), "attention flashdecoding on hpu"),
        (served(*FLASH, "invented", "cuda"), "attention invented on cuda"),
        (replace(served("CausalLM", "CausalLMBatch"), ranks=8), "on 8 ranks"),
    ],
)
def test_everything_else_is_refused_in_a_sentence(model: Served, named: str) -> None:
    said = refusal(model)
    assert said is not None
    assert named in said
    assert said.startswith("KV ")
    assert said.endswith(".")


# --- what a model is ---


def tokenizer_of(*words: str) -> Any:
    """As transformers' fast tokenizers hold it."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return SimpleNamespace(backend_tokenizer=inner)


def test_what_the_last_call_asked_for_is_no_part_of_a_tokenizer() -> None:
    tokenizer = tokenizer_of("a", "b")
    before = tokenizer_hash(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(max_length=7)
    tokenizer.backend_tokenizer.enable_padding(length=9, direction="left")
    assert '"max_length":7' in tokenizer.backend_tokenizer.to_str()
    assert tokenizer_hash(tokenizer) == before
    assert len(before) == 16


def test_another_vocabulary_or_rule_is_another_tokenizer() -> None:
    other_rule = tokenizer_of("a", "b")
    other_rule.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hashes = [tokenizer_hash(one) for one in (tokenizer_of("a", "b"), tokenizer_of("b", "a"), other_rule)]
    assert len(set(hashes)) == 3
    assert tokenizer_hash(tokenizer_of("a", "b")) == hashes[0]


def test_a_slow_tokenizer_is_known_by_its_vocabulary() -> None:
    def slow(**vocabulary: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: vocabulary)

    assert tokenizer_hash(slow(a=0, b=1)) == tokenizer_hash(slow(b=1, a=0))
    assert tokenizer_hash(slow(a=0, b=1)) != tokenizer_hash(slow(a=1, b=0))


CONFIG = SimpleNamespace(rope_theta=10000.0, max_position_embeddings=2048, hidden_size=64)


def test_position_settings_are_the_models_and_tgis() -> None:
    assert json.loads(rope_of(CONFIG, {})) == {"rope_theta": 10000.0, "max_position_embeddings": 2048}
    overridden = json.loads(rope_of(CONFIG, {"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "2.0"}))
    assert overridden == json.loads(rope_of(CONFIG, {})) | {"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "2.0"}
    assert rope_of(None, {}) == "{}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ""), ("", ""), ("b,a", "a,b"), (" a , b=/path,, ", "a,b=/path"), ("a", "a")],
)
def test_adapters_have_one_order(value: str | None, expected: str) -> None:
    assert adapters_of({} if value is None else {"LORA_ADAPTERS": value}) == expected


SPEC = ShardSpec("dep", "p0", Role.PREFILL, "/models/smol", "smol", revision="r1")


def test_a_fingerprint_counts_the_heads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ADAPTERS", "z,a")
    monkeypatch.delenv("ROPE_SCALING", raising=False)
    monkeypatch.delenv("ROPE_FACTOR", raising=False)
    model = SimpleNamespace(
        tokenizer=tokenizer_of("a"),
        dtype="torch.bfloat16",
        world_size=2,
        quantize=None,
        model=SimpleNamespace(config=CONFIG),
    )
    shape = KVShape(
        layers=30, kv_heads=3, head_dim=64, dtype="float8_e5m2", bytes_per_token=11520, tokens=4096
    )
    found = fingerprint_of(model, SPEC, shape, "flashinfer", 1)
    assert (found.model, found.revision, found.dtype, found.kv_dtype) == (
        "smol",
        "r1",
        "bfloat16",
        "float8_e5m2",
    )
    assert (found.layers, found.kv_heads, found.head_dim, found.tensor_parallel) == (30, 6, 64, 2)
    assert (found.adapters, found.quantization, found.attention, found.block_size) == (
        "a,z",
        "",
        "flashinfer",
        1,
    )
    assert found.rope == rope_of(CONFIG, {})
