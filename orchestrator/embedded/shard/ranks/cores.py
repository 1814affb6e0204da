"""Which CPU cores a rank runs on.  Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cores_of(cpus: Sequence[int], ranks: int, rank: int) -> tuple[int, ...]:
    """An equal part of the shard's cores; all of them where there are fewer cores than ranks.

    Equal, because another number of threads rounds differently, and all ranks must choose alike.
    """
    each = len(cpus) // ranks
    return tuple(cpus[rank * each : (rank + 1) * each] if each else cpus)


def threads_of(cores: int, ranks: int) -> int:
    """Threads of each rank where the shard has so many cores."""
    return max(1, cores // ranks)
