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


def test_the_oldest_are_forgotten() -> None:
    begun = Begun(most=2)
    for handle in "abc":
        begun.continues(handle, [1])
    assert not begun.continues("a", [2])
    assert begun.continues("c", [2])
