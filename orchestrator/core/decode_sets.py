"""Which decode shards each hot group keeps to: few, the same ones while it is hot, shared with few others.

Rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998) among the
shards that the fewest groups use.  All groups together leave some shards to other traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

NONE: frozenset[str] = frozenset()


class DecodeSets:
    """Of `share` of the decode shards for each group, and of `pool_share` for all; one at least."""

    def __init__(self, *, share: float, pool_share: float) -> None:
        self._share = share
        self._pool_share = pool_share
        self._shards: tuple[str, ...] | None = None
        """For which the sets were chosen; None where they have to be chosen anew."""
        self._sets: dict[int, list[str]] = {}
        """In the order in which the groups became hot."""
        self._frozen: dict[int, frozenset[str]] = {}
        self._all = NONE

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, group: int) -> None:
        """A group became hot."""
        self._sets[group] = []
        self._shards = None

    def remove(self, group: int) -> None:
        """A group has cooled down; what others use stays as it is."""
        del self._sets[group]
        self._shards = None

    def of(self, group: int, shards: Sequence[str]) -> frozenset[str]:
        """Some of `shards`, never all of several; all of them for a group that is not hot."""
        self._settle(shards)
        chosen = self._frozen.get(group)
        return frozenset(shards) if chosen is None else chosen

    def last(self, group: int) -> frozenset[str]:
        """What was last chosen for a hot group."""
        return self._frozen.get(group, NONE)

    def union(self, shards: Sequence[str]) -> frozenset[str]:
        """What the hot groups use together."""
        self._settle(shards)
        return self._all

    def _settle(self, shards: Sequence[str]) -> None:
        known = tuple(shards)
        if known == self._shards:
            return
        self._shards = known
        each = _part(self._share, len(known))
        pool = max(each, _part(self._pool_share, len(known)))
        used: Counter[str] = Counter()
        for group, chosen in self._sets.items():
            self._sets[group] = _chosen(group, chosen, known, used, each, pool)
            used.update(self._sets[group])
        self._frozen = {group: frozenset(chosen) for group, chosen in self._sets.items()}
        self._all = frozenset(used)


def _part(share: float, count: int) -> int:
    """So many of `count`: one at least, not all of several."""
    return min(max(1, int(share * count + 1e-9)), max(1, count - 1), count)


def _chosen(
    group: int, before: list[str], shards: Sequence[str], used: Counter[str], each: int, pool: int
) -> list[str]:
    """The group's earlier shards as far as they are there, then those that the fewest others use."""
    chosen: list[str] = []
    fresh = pool - len(used)
    """How many shards may come into use that no other group has."""
    for shard in [*(shard for shard in before if shard in shards), *_ranked(group, shards, used)]:
        if len(chosen) == each:
            break
        if shard in chosen or (shard not in used and fresh == 0):
            continue
        fresh -= shard not in used
        chosen.append(shard)
    return chosen


def _ranked(group: int, shards: Sequence[str], used: Counter[str]) -> list[str]:
    return sorted(shards, key=lambda shard: (used[shard], xxh3_64_intdigest(shard.encode(), group), shard))
