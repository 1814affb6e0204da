"""A get leg that comes again with a longer prompt is a continuation; with the same one, a second try."""

from __future__ import annotations

from tgi_patches.pieces import Begun


def test_only_another_prompt_continues() -> None:
    begun = Begun()
    assert not begun.continues("a", [1, 2, 3])
    assert not begun.continues("a", (1, 2, 3))
    assert begun.continues("a", [1, 2, 3, 4])
    assert begun.continues("a", [1, 2, 3, 4, 5])
    assert not begun.continues("b", [1, 2, 3, 4])
    assert not begun.continues("a", [1, 2, 3])


def test_a_prompt_that_was_cut_to_the_same_length_continues() -> None:
    """`truncate` keeps the last tokens: of the prompt, then of the prompt and what was said."""
    begun = Begun()
    begun.continues("a", [1, 2, 3])
    assert begun.continues("a", [2, 3, 4])


def test_those_that_were_not_seen_for_longest_are_forgotten() -> None:
    """An answer of many pieces is remembered from piece to piece, however many others begin meanwhile."""
    begun = Begun(most=2)
    begun.continues("long", [1])
    for number, other in enumerate("abcdef"):
        begun.continues(other, [1])
        assert begun.continues("long", [1] * (number + 2))
    assert begun.continues("f", [2])
    assert not begun.continues("a", [2])
