"""What ended since the test began; workers hand theirs to the master with each report."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from .timing import Outcome

KEY = "tgi_load"


class Tally:
    """Exact values, kept for percentiles and goodput: Locust's own tables are rounded."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.lags_ms: list[float] = []
        """How late the load generator's event loop was, a sample every tenth of a second."""
        self._told = (0, 0)

    def clear(self) -> None:
        self.outcomes.clear()
        self.lags_ms.clear()
        self._told = (0, 0)

    def tell(self, report: MutableMapping[str, Any]) -> None:
        """Add what is new since the last report."""
        outcomes, lags = self._told
        report[KEY] = [[one.row() for one in self.outcomes[outcomes:]], self.lags_ms[lags:]]
        self._told = (len(self.outcomes), len(self.lags_ms))

    def hear(self, report: Mapping[str, Any]) -> None:
        """Take what a worker told."""
        rows, lags_ms = report.get(KEY, ((), ()))
        self.outcomes += [Outcome(*row) for row in rows]
        self.lags_ms += lags_ms
