"""What a check found, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    name: str
    state: State
    told: str
    """One sentence."""
    do: str = ""
    """What to do: of a warning or a failure."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """By name with units, as JSON can hold them."""

    def __post_init__(self) -> None:
        assert self.do or self.state in (State.OK, State.SKIPPED), "what to do is not said"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"figures": dict(self.figures)}


def ok(name: str, told: str, **figures: Any) -> Finding:
    return Finding(name, State.OK, told, figures=figures)


def warning(name: str, told: str, do: str, **figures: Any) -> Finding:
    return Finding(name, State.WARNING, told, do, figures)


def failed(name: str, told: str, do: str, **figures: Any) -> Finding:
    return Finding(name, State.FAILED, told, do, figures)


def skipped(name: str, told: str, **figures: Any) -> Finding:
    return Finding(name, State.SKIPPED, told, figures=figures)


@dataclass(frozen=True, slots=True)
class Report:
    """All of them."""

    deployment: str
    findings: Sequence[Finding]
    unreachable: bool = False
    """No engine answered."""
    unreadable: bool = False
    """The settings cannot be used: the rest was checked with the defaults."""

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(finding.state for finding in self.findings)
        return {state.value: found[state] for state in State}

    @property
    def exit_code(self) -> int:
        """2 for settings that cannot be used, 3 without an engine, 1 for any other failure."""
        if self.unreadable:
            return 2
        if self.unreachable:
            return 3
        return int(self.counts[State.FAILED] > 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": self.deployment,
            "findings": [finding.to_dict() for finding in self.findings],
            "summary": self.counts | {"exit_code": self.exit_code},
        }
