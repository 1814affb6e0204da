"""What an answer must look like, as one regular expression: TGI's own way with JSON schemas.

Follows `router/src/validation.rs` of TGI v3.3.7, with the library that its router calls.  Of the
meta-schema only what that library notices is checked, so its sentence may be another than TGI's.
"""

from __future__ import annotations

import json
from typing import Any

from outlines_core.json_schema import build_regex_from_schema  # type: ignore[import-untyped]

from orchestrator.core.validation import invalid
from orchestrator.errors import InvalidRequest

PATTERN_LIMIT_CHARS = 500_000
"""Of the expression; a schema of a hundred bounded strings makes 400,000."""


class PatternError(ValueError):
    """An expression that cannot be followed; the text says why, in one line."""


def pattern_of(grammar: Any) -> str:
    """The expression of a `Grammar`.  InvalidRequest with TGI's sentence for one that has none."""
    match grammar.type:
        case "regex":
            pattern = str(grammar.value)
        case "json_schema":
            pattern = _of_schema(grammar.value["schema"])
        case _:
            pattern = _of_schema(_decoded(grammar.value))
    if len(pattern) > PATTERN_LIMIT_CHARS:
        raise not_valid(
            f"its expression has {len(pattern)} characters, and at most {PATTERN_LIMIT_CHARS} are taken"
        )
    return pattern


def not_valid(why: str) -> InvalidRequest:
    """TGI's wording."""
    return invalid(f"grammar is not valid: {why}")


def _decoded(value: Any) -> Any:
    """A schema may also come as JSON in a string."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise not_valid(str(error)) from None
    if not isinstance(value, dict):
        raise invalid("grammar is not supported")
    return value


def _of_schema(schema: Any) -> str:
    if not isinstance(schema, dict) or "properties" not in schema:
        raise not_valid("Grammar must have a 'properties' field")
    try:
        pattern: str = build_regex_from_schema(json.dumps(schema))
    except (ValueError, TypeError) as error:  # the latter for one that is nested too deeply
        raise invalid(f"cannot compile regex from schema: {_first_line(error)}") from None
    return pattern


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].strip()
