"""Prompts made of word lists: English-like prose and Python-like code, from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

_SUBJECTS = (
    "the harbour", "an old engineer", "every visitor", "the northern line", "our neighbour", "the committee",
    "a quiet machine", "the second report", "winter", "the market", "a young botanist", "the archive",
    "this bridge", "the night train", "her brother", "the council", "a careful reader", "the river",
)  # fmt: skip
_VERBS = (
    "describes", "carries", "measured", "forgot", "will repair", "compares", "explains", "changed", "kept",
    "has improved", "waits for", "divides", "collected", "followed", "builds", "questions", "replaced",
)  # fmt: skip
_OBJECTS = (
    "the first plan", "a list of names", "three small boats", "the cost of heating", "an answer", "the map",
    "a better method", "the water level", "what the letters said", "the evening light", "a hundred samples",
    "the rules of the game", "its own history", "the missing page", "a warm room", "the timetable",
)  # fmt: skip
_LINKS = (
    "because", "while", "although", "and", "before", "so that", "after", "whenever", "as if", "until", "but",
)  # fmt: skip
_PLACES = (
    "in the valley", "near the station", "during the summer", "without much noise", "at low tide",
    "for the third time", "on a narrow road", "with some patience", "at the edge of town", "every morning",
)  # fmt: skip
_ASKS = (
    "Please explain that in simple words.", "What would you change, and why?", "Summarise this for a friend.",
    "Which part is wrong?", "Write a short story about it.", "Give me three reasons.", "How does it go on?",
    "Turn this into a list of steps.", "What is the main point?", "Compare both sides, please.",
)  # fmt: skip
_ACTIONS = ("load", "merge", "count", "filter", "render", "parse", "split", "update", "order", "check")
_THINGS = ("rows", "names", "prices", "edges", "pages", "users", "blocks", "events", "labels", "weights")
_STEPS = (
    "{a} = [item for item in {b} if item]",
    "{a} = sorted({b}, key=lambda item: item[0])",
    "for index, item in enumerate({b}):\n        {a}[index] = item",
    "if not {b}:\n        return None",
    "{a} = {{key: len(value) for key, value in {b}.items()}}",
    "{a} = {b}[:{n}] + {b}[{n}:]",
    "total = sum(len(item) for item in {b}) + {n}",
)
CODE_STOPS = ("\ndef ", "\n\n\n")


def prose(rng: Random, characters: int) -> str:
    """Sentences of `characters` or a few less, at least one word."""
    return _filled(lambda: _sentence(rng) + " ", characters)


def question(rng: Random, characters: int) -> str:
    """What a chat user writes: prose, when there is room, and something to do with it."""
    ask = rng.choice(_ASKS)
    room = characters - len(ask) - 1
    return f"{prose(rng, room)} {ask}" if room > 20 else _cut(ask, characters)


def code(rng: Random, characters: int) -> str:
    """Functions, and the head of one that is to be completed; about `characters`."""
    head = _head(rng)
    room = characters - len(head)
    return (_filled(lambda: _function(rng), room) + "\n\n\n" if room > 20 else "") + head


def _filled(make: Callable[[], str], characters: int) -> str:
    return _cut("".join(_until(make, characters)), characters)


def _until(make: Callable[[], str], characters: int) -> Iterator[str]:
    length = 0
    while length < characters:
        piece = make()
        length += len(piece)
        yield piece


def _cut(text: str, characters: int) -> str:
    """At a word's end where there is one."""
    if len(text) > characters:
        text = text[: max(1, characters)]
        text = text[: text.rfind(" ")] if " " in text.strip() else text
    return text.rstrip()


def _sentence(rng: Random) -> str:
    words = _clause(rng)
    if rng.random() < 0.6:
        words += f" {rng.choice(_LINKS)} {_clause(rng)}"
    return words[0].upper() + words[1:] + "."


def _clause(rng: Random) -> str:
    clause = f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}"
    return f"{clause} {rng.choice(_PLACES)}" if rng.random() < 0.4 else clause


def _head(rng: Random) -> str:
    action, thing, other = rng.choice(_ACTIONS), rng.choice(_THINGS), rng.choice(_THINGS)
    return f'def {action}_{thing}({other}):\n    """{action.title()} the {thing} of the {other}."""\n'


def _function(rng: Random) -> str:
    steps = (
        rng.choice(_STEPS).format(a=rng.choice(_THINGS), b=rng.choice(_THINGS), n=rng.randrange(2, 99))
        for _ in range(rng.randrange(2, 6))
    )
    body = "\n    ".join(steps)
    return f"{_head(rng)}    {body}\n    return {rng.choice(_THINGS)}\n\n\n"
