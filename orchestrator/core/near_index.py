"""Finds a fingerprint near another among many, without comparing all of them.

Fingerprints that differ in fewer bits than there are bands agree on all bits of some band (the pigeonhole
index of Manku, Jain and Das Sarma, "Detecting Near-Duplicates for Web Crawling", WWW 2007).
"""

from __future__ import annotations

from itertools import chain
from operator import getitem

BANDS = 8
"""Of 8 bits each."""
DISTANCE_MOST = BANDS - 1
BUCKET_MOST = 32
"""So that a search stays short whatever comes: what finds no place in one bucket finds it in others."""


class NearIndex:
    """64-bit fingerprints, each once."""

    def __init__(self, distance_bits: int) -> None:
        """Finds what differs in at most so many bits; beyond `DISTANCE_MOST` it would miss some."""
        self._distance_bits = distance_bits
        self._bands: list[list[set[int]]] = [[set() for _ in range(256)] for _ in range(BANDS)]

    def add(self, fingerprint: int) -> None:
        for bucket in self._buckets(fingerprint):
            if len(bucket) < BUCKET_MOST:
                bucket.add(fingerprint)

    def remove(self, fingerprint: int) -> None:
        for bucket in self._buckets(fingerprint):
            bucket.discard(fingerprint)

    def nearest(self, fingerprint: int) -> int | None:
        """The smallest one of those that are nearest; None where none is near enough."""
        most = self._distance_bits
        candidates = chain.from_iterable(self._buckets(fingerprint))
        near = [other for other in candidates if (other ^ fingerprint).bit_count() <= most]
        if not near:
            return None
        return min(near, key=lambda other: ((other ^ fingerprint).bit_count(), other))

    def _buckets(self, fingerprint: int) -> map[set[int]]:
        return map(getitem, self._bands, fingerprint.to_bytes(BANDS, "little"))
