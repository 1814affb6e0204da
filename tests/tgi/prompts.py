"""Prompts of many lengths and scripts, for servers of SmolLM2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.tgi.pair import Prompt

_OPENINGS = (
    "The capital of France is",
    "Explain in one sentence why the sky is blue.",
    "def fibonacci(n):\n    ",
    "List three animals that live in the sea:\n1.",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,",
    "水は100度で",
    "Q: What is 12 times 12?\nA:",
    '{"name": "Ada", "age":',
)
_WORDS = (
    *("river", "stone", "lamp", "paper", "window", "garden", "engine", "letter", "bridge", "winter", "apple"),
    *("music", "table", "cloud", "mountain", "and", "the", "of", "in", "with", "under", "over", "because"),
    *("while", "never", "always", "small", "old", "green"),
)
WORD_COUNTS = (0, 0, 0, 8, 0, 20, 33, 0, 47, 60, 61, 62, 63, 90, 120, 126, 180, 250, 330, 440)
"""Added to an opening, one for each of twenty prompts: around the ends of blocks of 64 tokens too."""


def twenty(folder: Path) -> list[Prompt]:
    """Twenty prompts of 3 to about 460 tokens, the same in every run."""
    tokenizer = tokenizer_of(folder)
    chance = random.Random(20)
    return [
        prompt_of(tokenizer, _lengthened(chance, _OPENINGS[number % len(_OPENINGS)], count))
        for number, count in enumerate(WORD_COUNTS)
    ]


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompt_of(tokenizer: Any, text: str) -> Prompt:
    return Prompt(text, tuple(tokenizer(text)["input_ids"]))


def _lengthened(chance: random.Random, opening: str, count: int) -> str:
    words = [chance.choice(_WORDS) for _ in range(count)]
    return " ".join([*words, opening])
