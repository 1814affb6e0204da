"""Counters and histograms as plain dictionaries and lists: cheap to add to, easy to add up.

A request adds to some twenty of them; prometheus_client's own objects cost ten times as much for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import orjson

from orchestrator.metrics.families import COUNTERS, HISTOGRAMS

Labels = tuple[str, ...]


class Distribution:
    """One histogram: how many values fell into each bucket, and their sum.

    `observe` only appends to a list: sorting many values at once costs a quarter of placing each one.
    """

    __slots__ = ("_fresh", "bounds", "counts", "observe", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._fresh: list[float] = []
        self.observe: Callable[[float], None] = self._fresh.append
        self.bounds = bounds
        """Upper bounds, inclusive; above the last there is one more bucket."""
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def fold(self) -> None:
        """Bring `counts` and `sum` up to date."""
        fresh = self._fresh
        if not fresh:
            return
        fresh.sort()
        before = 0
        for bucket, bound in enumerate(self.bounds):
            below = bisect_right(fresh, bound)
            self.counts[bucket] += below - before
            before = below
        self.counts[-1] += len(fresh) - before
        self.sum += sum(fresh)
        fresh.clear()


class Distributions(dict[Labels, Distribution]):
    """Histograms of one name by their label values; one that is not there yet is made."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__()
        self.bounds = bounds

    def __missing__(self, labels: Labels) -> Distribution:
        made = self[labels] = Distribution(self.bounds)
        return made


class Tally:
    """All counters and histograms of one worker, or of several added up."""

    def __init__(self) -> None:
        self.queued = 0
        """Requests that wait for a grant now."""
        self.open = 0
        """Requests in the gateway now, waiting ones included."""
        self.counters: dict[str, defaultdict[Labels, float]] = {}
        self.histograms: dict[str, Distributions] = {}
        for counted in COUNTERS:
            self.counters[counted.name] = values = defaultdict(float)
            if not counted.labels:
                values[()] = 0.0
        for measured in HISTOGRAMS:
            self.histograms[measured.name] = by_labels = Distributions(measured.bounds)
            if not measured.labels:
                by_labels[()] = Distribution(measured.bounds)

    def fold(self) -> None:
        """Bring every histogram up to date, and free what waited for it."""
        for by_labels in self.histograms.values():
            for one in by_labels.values():
                one.fold()

    def to_json(self) -> bytes:
        self.fold()
        counters = {name: list(values.items()) for name, values in self.counters.items()}
        histograms = {
            name: [(labels, one.counts, one.sum) for labels, one in by_labels.items()]
            for name, by_labels in self.histograms.items()
        }
        now = {"queued": self.queued, "open": self.open}
        return orjson.dumps({"now": now, "counters": counters, "histograms": histograms})

    def add(self, snapshot: bytes, *, lives: bool) -> None:
        """Add what `to_json` gave, here or in another worker; of one that ended, no request is open any more.

        ValueError for anything else.
        """
        try:
            told = orjson.loads(snapshot)
            self._add(told)
            if lives:
                self.queued += told["now"]["queued"]
                self.open += told["now"]["open"]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a snapshot: {error!r}") from error

    def _add(self, told: dict[str, Any]) -> None:
        for name, values in told["counters"].items():
            into = self.counters[name]
            for labels, value in values:
                into[tuple(labels)] += value
        for name, listed in told["histograms"].items():
            by_labels = self.histograms[name]
            for labels, counts, total in listed:
                one = by_labels[tuple(labels)]
                one.counts = [mine + theirs for mine, theirs in zip(one.counts, counts, strict=True)]
                one.sum += total
