"""What a gateway costs: CPU time per unit of ours and of others', on the same mock shards, in one run.

The gateway that is measured has one core for itself; mock shards and load share another.  Rounds take
turns, medians are reported.  See docs/benchmarks.md, "The gateway".
"""

from __future__ import annotations
