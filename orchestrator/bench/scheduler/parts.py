"""What a part of the bench reports: figures in rows, conditions, and targets that are met or missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Row = Mapping[str, str | float | int | None]
"""A line of the part's table: all rows of a part have the same keys, which are its columns."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target; `value` is None where it was not measured."""

    what: str
    value: float | None
    limit: float
    at_least: bool = False
    """The value is to be at least the limit; otherwise at most."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, slots=True)
class Part:
    """One part's report."""

    name: str
    title: str
    rows: Sequence[Row]
    verdicts: Sequence[Verdict] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Sentences for people, below the table."""

    def to_dict(self) -> dict[str, Any]:
        """JSON of everything."""
        return {
            "title": self.title,
            "conditions": dict(self.conditions),
            "rows": [dict(row) for row in self.rows],
            "targets": [verdict.to_dict() for verdict in self.verdicts],
            "notes": list(self.notes),
        }
