"""What mixing prefill into decode costs, and what separation buys, on this machine.

Endless decode streams run while prompts arrive at random (Poisson).  Three ways to serve both on the
same two cores take turns: colocated with prefill first, colocated with chunks, and separated.
"""

from __future__ import annotations

from orchestrator.bench.interference.run import Plan, Result, run

__all__ = ["Plan", "Result", "run"]
