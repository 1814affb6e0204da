"""A settings file that is written is read as the same settings, whatever stands in it."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.settings_text import settings_text


def test_sections_comments_and_notes() -> None:
    text = settings_text(
        {"version": 1, "model.id": "a/b", "shards.prefill.args": ["--x", "1"], "shards.decode.count": 2},
        {"shards": "Why so many.", "model.id": "Which one."},
        head=["Written by hand."],
        notes=["One thing is left.", "  docker inspect it"],
    )
    assert (
        text
        == """\
# Written by hand.

version: 1
model:
  # Which one.
  id: a/b
# Why so many.
shards:
  prefill:
    args: [--x, '1']
  decode:
    count: 2

# - One thing is left.
#     docker inspect it
"""
    )


NAMES = st.text("abcdef_", min_size=1, max_size=4)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(st.characters(exclude_categories=["Cs"]))),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
TREES = st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), min_size=1, max_size=3)
SENTENCES = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@settings(deadline=None)
@given(TREES, SENTENCES, SENTENCES, SENTENCES)
def test_what_is_written_is_read_back(
    tree: dict[str, dict[str, Any]], head: str, comment: str, note: str
) -> None:
    flat = {f"{section}.{name}": value for section, keys in tree.items() for name, value in keys.items()}
    comments = dict.fromkeys([*flat, *tree], comment)
    text = settings_text(flat, comments, head=[head], notes=[note])
    assert yaml.safe_load(text) == tree
