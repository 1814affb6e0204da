"""What `doctor` measured between two containers, and what a deployment begins with because of it.

Seeds only: what requests teach later counts more, and what a topology already says stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.cost import Costs, RelayCost
from orchestrator.core.topology import Bandwidth, Topology

VERSION = 1
ARENA, PULL = "arena", "pull"
"""The transports that records take; others are measured for placement and for people."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One transport: a record takes `latency_s + bytes / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float
    gb_per_s: float
    """Of a whole record, latency and all."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that cannot be true."""
        RelayCost(self.latency_s, self.bytes_per_s)
        if isinstance(self.gb_per_s, bool) or not 0 < self.gb_per_s < 1e6:
            raise ValueError(f"gb_per_s must be a number above 0, not {self.gb_per_s!r}.")

    @property
    def cost(self) -> RelayCost:
        return RelayCost(self.latency_s, self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """By transport, those that were proved; `when` in ISO 8601, `engine` its id."""

    when: str
    engine: str
    transports: Mapping[str, Measured] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        transports = {name: dataclasses.asdict(one) for name, one in self.transports.items()}
        return {"version": VERSION, "when": self.when, "engine": self.engine, "transports": transports}

    @classmethod
    def from_dict(cls, raw: Any) -> Bandwidths:
        """Raises ValueError for anything but what `to_dict` gives."""
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise ValueError(f"These are no bandwidths of version {VERSION}.")
        transports = raw.get("transports")
        if not isinstance(transports, dict):
            raise ValueError("The transports cannot be read.")
        try:
            measured = {str(name): Measured(**one) for name, one in transports.items()}
        except TypeError:
            raise ValueError("The transports cannot be read.") from None
        return cls(str(raw.get("when", "")), str(raw.get("engine", "")), measured)


def starting_costs(bandwidths: Bandwidths | None) -> Costs:
    """What records cost before any has travelled; nothing of a transport that was not proved."""
    known = bandwidths.transports if bandwidths else {}
    arena, pull = known.get(ARENA), known.get(PULL)
    return Costs(relay=arena.cost if arena else None, pull=pull.cost if pull else None)


def with_measured(topology: Topology, bandwidths: Bandwidths | None) -> Topology:
    """The host's own figures, where the topology has none of that transport."""
    told = {one.transport for one in topology.bandwidths if one.between is None}
    known = bandwidths.transports if bandwidths else {}
    more = [Bandwidth(name, one.gb_per_s) for name, one in known.items() if name not in told]
    return dataclasses.replace(topology, bandwidths=(*topology.bandwidths, *more))
