"""What a simulation tells: each request with its times, and the prefills that took place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.bench.scheduler.engine import Batch
from orchestrator.bench.scheduler.workload import Arrival
from orchestrator.core.ticket import Choice, Grant, Ticket

START_S = 1000.0
"""Virtual clocks begin here: to production's code a time of 0 means none."""


@dataclass(slots=True, eq=False)
class Served:
    """One request and what became of it.  Times are virtual seconds, NaN for what did not happen."""

    arrival: Arrival
    ticket: Ticket
    grant: Grant | None = None
    refused: str = ""
    granted_s: float = math.nan
    put_s: float = math.nan
    """The first leg was sent."""
    started_s: float = math.nan
    """A shard began with it."""
    first_s: float = math.nan
    published_s: float = math.nan
    get_s: float = math.nan
    imported_s: float = math.nan
    done_s: float = math.nan
    prefilled: bool = False
    """Its prompt was computed for it, on whichever shard."""

    @property
    def arrived_s(self) -> float:
        """From the simulation's beginning."""
        return self.arrival.at_s - START_S

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Between two tokens, on average; NaN for an answer of one."""
        rest = self.arrival.answer_tokens - 1
        return (self.done_s - self.first_s) / rest if rest else math.nan

    @property
    def waited_s(self) -> float:
        """From its arrival until a shard began with it."""
        return self.started_s - self.arrival.at_s

    def phases_s(self) -> dict[str, float]:
        """As a gateway measures them."""
        phases = {"queue": self.granted_s - self.arrival.at_s}
        if self.grant is not None and self.grant.choice is Choice.MIXED:
            phases |= {"prefill": self.first_s - self.put_s, "decode": self.done_s - self.first_s}
        elif self.grant is not None and self.grant.prefill is not None:
            phases |= {"prefill": self.first_s - self.put_s, "relay": self.published_s - self.first_s}
        if not math.isnan(self.imported_s):
            phases |= {"decode_wait": self.imported_s - self.get_s, "decode": self.done_s - self.imported_s}
        return {name: took_s for name, took_s in phases.items() if not math.isnan(took_s)}


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one run."""

    served: Sequence[Served]
    prefill_batches: Sequence[Batch]
    took_s: float
    """Virtual seconds from the first arrival to the last token."""
    peak_waiting: int = 0
    """Most tickets without a decision at once."""
    left: int = 0
    """Tickets without a decision and grants that still hold something, at the end."""
