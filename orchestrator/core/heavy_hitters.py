"""Which prompts come often, near-identical ones counted together, in bounded memory.

Space-Saving (Metwally, Agrawal and El Abbadi, ICDT 2005): a new group takes the place of the least counted
and inherits its count, so that a group with more than 1/`most` of all arrivals is always among them.
Forward decay (Cormode et al., ICDE 2009): later arrivals weigh more, so that old counts need no touch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.core.near_index import NearIndex

_REBASE_HALF_LIVES = 256.0
"""A double holds 2^1023."""
_NEGLIGIBLE = 2.0**-8
"""Of one arrival: a group that weighs less is gone."""


@dataclass(slots=True, eq=False)
class Group:
    """Prompts whose fingerprints are near `centre`, the first one's."""

    centre: int
    own: float
    """Weight of its own arrivals since it was formed."""
    counted: float
    """The same with what it inherited: never less than all of its arrivals weigh."""


class HeavyHitters:
    """At most `most` groups.  Times are seconds of a clock that does not go back."""

    def __init__(self, *, most: int, half_life_s: float, distance_bits: int) -> None:
        self._most = most
        self._half_life_s = half_life_s
        self._mass_s = half_life_s / math.log(2)
        """What arrivals at one per second weigh together."""
        self._index = NearIndex(distance_bits)
        self._groups: dict[int, Group] = {}
        self._order: list[tuple[float, int]] = []
        """A heap of one (counted, centre) per group; too low where a group has been counted since."""
        self._total = 0.0
        self._began_s = -math.inf
        """When an arrival weighed 1."""
        self._now_s = -math.inf
        self._weight_now = 1.0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, group: Group) -> bool:
        return self._groups.get(group.centre) is group

    def find(self, fingerprint: int) -> Group | None:
        """The group that it is near to."""
        group = self._groups.get(fingerprint)
        if group is not None:
            return group
        centre = self._index.nearest(fingerprint)
        return None if centre is None else self._groups[centre]

    def count(self, fingerprint: int, now_s: float) -> Group:
        """One arrival: the group that it belongs to, a new one if it is near none."""
        weight = self._weight(now_s)
        self._total += weight
        group = self.find(fingerprint)
        if group is None:
            return self._form(fingerprint, weight)
        group.own += weight
        group.counted += weight
        return group

    def per_s(self, group: Group, now_s: float) -> float:
        """Its arrivals per second lately; never more than there were."""
        return group.own / self._weight(now_s) / self._mass_s

    def share(self, group: Group) -> float:
        """Its part of all arrivals lately."""
        return group.own / self._total if self._total else 0.0

    def drop_idle(self, now_s: float) -> None:
        """Forget groups that have had no arrivals for long."""
        least = self._weight(now_s) * _NEGLIGIBLE
        while self._order and self._order[0][0] < least and self._least().counted < least:
            self._drop_least()

    def _form(self, fingerprint: int, weight: float) -> Group:
        inherited = self._drop_least() if len(self._groups) >= self._most else 0.0
        group = self._groups[fingerprint] = Group(fingerprint, weight, inherited + weight)
        heapq.heappush(self._order, (group.counted, fingerprint))
        self._index.add(fingerprint)
        return group

    def _least(self) -> Group:
        """The least counted group, which then stands first in the heap."""
        order, groups = self._order, self._groups
        while True:
            counted, centre = order[0]
            group = groups[centre]
            if group.counted == counted:
                return group
            heapq.heapreplace(order, (group.counted, centre))

    def _drop_least(self) -> float:
        """What it counted."""
        least = self._least()
        heapq.heappop(self._order)
        del self._groups[least.centre]
        self._index.remove(least.centre)
        return least.counted

    def _weight(self, now_s: float) -> float:
        """Of an arrival now."""
        if now_s != self._now_s:
            half_lives = (now_s - self._began_s) / self._half_life_s
            if half_lives > _REBASE_HALF_LIVES:
                self._rebase(half_lives, now_s)
                half_lives = 0.0
            self._now_s, self._weight_now = now_s, math.exp2(half_lives)
        return self._weight_now

    def _rebase(self, half_lives: float, now_s: float) -> None:
        """Weights count from now on."""
        factor = 2.0 ** -min(half_lives, 2000.0)
        self._began_s = now_s
        self._total *= factor
        for group in self._groups.values():
            group.own *= factor
            group.counted *= factor
        self._order = [(group.counted, centre) for centre, group in self._groups.items()]
        heapq.heapify(self._order)
