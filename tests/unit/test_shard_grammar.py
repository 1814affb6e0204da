"""Grammars as expressions, and which tokens an expression allows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.api.schemas import Grammar
from orchestrator.embedded.shard.choose import Chooser
from orchestrator.embedded.shard.grammar import PATTERN_LIMIT_CHARS, PatternError, pattern_of
from orchestrator.embedded.shard.loading import Loaded, load
from orchestrator.embedded.shard.matching import Matcher, Patterns
from orchestrator.embedded.shard.seam import Sampling
from orchestrator.errors import InvalidRequest

SCHEMA = {"properties": {"a": {"type": "null"}, "b": {"enum": [1, "x"]}}, "required": ["a", "b"]}
SCHEMA_PATTERN = r'\{[ ]?"a"[ ]?:[ ]?null[ ]?,[ ]?"b"[ ]?:[ ]?(1|"x")[ ]?\}'


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Loaded:
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def patterns(loaded: Loaded) -> Patterns:
    found = Patterns.of(loaded)
    assert found is not None
    return found


def allowed(matcher: Matcher, loaded: Loaded) -> set[int]:
    masked = matcher.mask(torch.zeros(loaded.model.config.vocab_size))
    return set(masked.isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "mine", "schema": SCHEMA}},
        {"type": "regex", "value": SCHEMA_PATTERN},
    ],
)
def test_every_kind_of_grammar_becomes_the_expression_that_tgi_makes(grammar: dict[str, Any]) -> None:
    assert pattern_of(Grammar(**grammar)) == SCHEMA_PATTERN


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "grammar is not supported"),
        ([], "grammar is not supported"),
        ("{", "grammar is not valid: "),
        ({}, "grammar is not valid: Grammar must have a 'properties' field"),
        ("true", "grammar is not valid: Grammar must have a 'properties' field"),
        (
            {"properties": {"a": {"type": "strin"}}},
            "cannot compile regex from schema: Unsupported type: strin",
        ),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "cannot compile regex from schema: "),
        (nested(200), "cannot compile regex from schema: "),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_tgis_words(value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pattern_of(Grammar(type="json", value=value))
    assert str(refused.value).startswith(f"Input validation error: {sentence}")
    assert "\n" not in str(refused.value)


def test_an_expression_has_a_longest_length() -> None:
    assert pattern_of(Grammar(type="regex", value="a" * PATTERN_LIMIT_CHARS))
    with pytest.raises(InvalidRequest, match="500001 characters"):
        pattern_of(Grammar(type="regex", value="a" * (PATTERN_LIMIT_CHARS + 1)))


def test_exactly_the_tokens_that_some_text_of_the_language_goes_on_with_are_allowed(
    patterns: Patterns, loaded: Loaded
) -> None:
    """The language is listed in full, so that every token can be tried at every place."""
    pattern = "(the|ship|h)[ x]?(one|harbour)?"
    parts = product(("the", "ship", "h"), ("", " ", "x"), ("one", "harbour", ""))
    language = {"".join(part) for part in parts}
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    tokenizer, (end,) = loaded.tokenizer, loaded.eos_token_ids
    texts = {i: tokenizer.decode([i]) for i in range(3, len(tokenizer))}  # the first three are special
    seen = 0
    for written in ("", "h", "t", "the", "ship ", "hx", "shiphar", "the one"):
        matcher = patterns.matcher(pattern)
        for character in written.replace(" ", "\u0120"):
            assert matcher.advance(tokenizer.convert_tokens_to_ids(character))
        fitting = {i for i, text in texts.items() if text and written + text in prefixes}
        if len({texts[i][0] for i in fitting}) == 1 and written not in language:
            (only,) = allowed(matcher, loaded)  # one text can follow, and is taken in its own tokens
            assert only in fitting
        else:
            assert allowed(matcher, loaded) == fitting | ({end} if written in language else set())
            seen += len(fitting)
    assert seen > 20


def test_two_answers_to_one_expression_do_not_share_their_place(patterns: Patterns, loaded: Loaded) -> None:
    first, second = patterns.matcher("[ab]c"), patterns.matcher("[ab]c")
    a, c = loaded.tokenizer.convert_tokens_to_ids(["a", "c"])
    start = allowed(second, loaded)
    assert first.advance(a)
    assert allowed(first, loaded) == {c}
    assert allowed(second, loaded) == start
    assert allowed(patterns.matcher("[ab]c"), loaded) == start


def test_after_the_last_character_and_after_a_wrong_token_only_the_end_is_left(
    patterns: Patterns, loaded: Loaded
) -> None:
    a, b = loaded.tokenizer.convert_tokens_to_ids(["a", "b"])
    (end,) = loaded.eos_token_ids
    complete, lost = patterns.matcher("a"), patterns.matcher("aa")
    assert complete.advance(a)
    assert allowed(complete, loaded) == {end}
    assert complete.advance(end)
    assert allowed(complete, loaded) == {end}  # for a request that ignores the end token
    assert not lost.advance(b)
    assert allowed(lost, loaded) == {end}


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"\bword\b", "a$b"])
def test_an_expression_that_cannot_be_followed_is_told_in_one_line(patterns: Patterns, pattern: str) -> None:
    with pytest.raises(PatternError) as refused:
        patterns.check(pattern)
    assert 5 < len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)
    assert "at 1(" not in str(refused.value)


def test_a_tokenizer_that_cannot_be_walked_has_no_patterns(loaded: Loaded) -> None:
    assert Patterns.of(replace(loaded, eos_token_ids=())) is None
    assert Patterns.of(replace(loaded, tokenizer=SimpleNamespace())) is None


def test_more_scores_than_tokens_and_more_tokens_than_scores_can_be_masked(loaded: Loaded) -> None:
    (a,) = loaded.tokenizer.convert_tokens_to_ids(["a"])
    for vocab in (len(loaded.tokenizer) + 9, len(loaded.tokenizer) - 9):
        model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab))
        patterns = Patterns.of(replace(loaded, model=model))
        assert patterns is not None
        masked = patterns.matcher("a").mask(torch.ones(vocab))
        assert masked.shape == (vocab,)
        assert masked.isfinite().nonzero()[:, 0].tolist() == [a]


def test_penalties_come_before_the_mask_and_warpers_after_it(patterns: Patterns, loaded: Loaded) -> None:
    """Of three allowed tokens, top-k 2 leaves two; the likeliest token of all is not among them."""
    size = loaded.model.config.vocab_size
    a, b, c, z = loaded.tokenizer.convert_tokens_to_ids(["a", "b", "c", "z"])
    scores = torch.zeros(size)
    scores[[a, b, c, z]] = torch.tensor([4.0, 3.0, 1.0, 9.0])
    sampling = Sampling(do_sample=True, top_k=2, repetition_penalty=8.0)
    processed = Chooser(sampling, patterns.matcher("[abc]")).process(scores, [a])
    assert processed.isfinite().nonzero()[:, 0].tolist() == sorted([b, c])
    greedy = Chooser(Sampling(), patterns.matcher("[abc]"))
    assert not greedy.plain_greedy
    assert greedy.pick(greedy.process(scores, [])) == a
    assert Chooser(Sampling()).plain_greedy
