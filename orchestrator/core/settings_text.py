"""Settings as a YAML file that a person reads: a comment above a key says why it has that value.  Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

COLUMNS = 100


def settings_text(
    values: Mapping[str, Any], comments: Mapping[str, str], *, head: Sequence[str], notes: Sequence[str]
) -> str:
    """`values` and `comments` by dotted key, in order; a comment may stand at a section as well.

    `head` comes before all, `notes` behind, as comments.
    """
    lines = [*_commented(head), "", *_section(values, comments, "")]
    if notes:
        lines += ["", *_commented(notes, bullet="- ")]
    return "\n".join(lines) + "\n"


def _section(values: Mapping[str, Any], comments: Mapping[str, str], at: str) -> Iterator[str]:
    """The keys below `at`, each section where its first key stands."""
    indent = "  " * (at.count(".") + 1 if at else 0)
    prefix = f"{at}." if at else ""
    seen: set[str] = set()
    for key in values:
        if not key.startswith(prefix) or (name := key[len(prefix) :].partition(".")[0]) in seen:
            continue
        seen.add(name)
        here = prefix + name
        if here in comments:
            yield from _commented([comments[here]], indent=indent)
        if here in values:
            yield f"{indent}{name}: {_plain(values[here])}"
        else:
            yield f"{indent}{name}:"
            yield from _section(values, comments, here)


def _commented(texts: Sequence[str], *, indent: str = "", bullet: str = "") -> Iterator[str]:
    for text in texts:
        if text.startswith("  "):  # a command stays in one piece, to be copied
            yield f"{indent}#     {_printable(text)}"
            continue
        yield from textwrap.wrap(
            _printable(text),
            COLUMNS,
            initial_indent=f"{indent}# {bullet}",
            subsequent_indent=f"{indent}# {' ' * len(bullet)}",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _printable(text: str) -> str:
    """On one line, whatever counts as the end of one in YAML or in Unicode."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


class _OneLine(yaml.SafeDumper):
    """Writes text with line ends and such between double quotes, escaped, so that it stays on its line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_OneLine.add_representer(str, _text)


def _plain(value: Any) -> str:
    """On one line; what could be taken for something else is quoted."""
    said = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, width=2**30, allow_unicode=True, sort_keys=False
    )
    return str(said).removesuffix("\n").removesuffix("\n...")
