"""The online fit of one law, `seconds = f + g * x + h * y`, from a bounded set of samples.

Weighted least squares of relative errors with Huber's weights, coefficients never negative.  Where samples
say nothing (every prompt of one length) a prior decides, scaled to what was measured.  All in plain Python.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

Coefficients = tuple[float, float, float]
"""Seconds: fixed, per x, per y."""
Point = tuple[float, float]
"""x and y of a sample."""
_Row = tuple[float, float, float, float]
"""x, y, seconds, weight."""

PER_SIZE = 8
"""Samples kept of each size (a power of two in x, of four in y), the youngest."""
MOST_SAMPLES = 192
HALF_LIFE = 64
"""A sample counts half when so many younger ones are known."""
LEAST_WEIGHT = 0.05
"""Of an old sample: it is all that is known of a size that is seldom met."""
REFIT_EVERY = 32
"""Samples between two fits, once many are known."""
LEAST_SAMPLES = 6
"""Before so many were seen a law without a prior says nothing."""
PRIOR_WEIGHT = 1.0
"""Of each anchor, in samples, where the prior was measured once."""
SHAPE_WEIGHT = 0.1
"""The same for a mere shape."""
LEAST_S, MOST_S, MOST_SIZE = 1e-6, 3600.0, 1e15

_HUBER = 1.345
"""95 % as efficient as least squares under normal noise (Huber, Robust Statistics, 1981)."""
FAR = 3.0
"""A sample so many times off the others of its size is left out, whatever the law says of that size."""
_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""
_LEAST_SPREAD = 0.02
_FIRST_ROUNDS, _ROUNDS = 40, 6
_SETTLED = 1e-3
"""Relative: two rounds that differ by less are the last."""
_LEAST_DETERMINANT = 1e-9


class Law:
    """Observes samples and knows the coefficients; `anchors` are sizes at which the prior has a say."""

    def __init__(
        self, shape: Coefficients, anchors: Sequence[Point], prior: Coefficients | None = None
    ) -> None:
        self._shape, self._anchors = shape, tuple(anchors)
        self._measured = prior is not None and any(prior)
        self._prior = prior if prior is not None and self._measured else shape
        self._fitted: Coefficients | None = None
        self._buckets: dict[tuple[int, int], deque[_Row]] = {}
        """By size, the one that was met last at the end; the last part of a row is its number here."""
        self._kept = 0
        self._next_fit = 0
        self.seen = 0

    @property
    def due(self) -> bool:
        """True when enough was observed since the last fit for another one to be worth its time."""
        return self.seen >= self._next_fit and self._kept > 0

    def observe(self, x: float, y: float, seconds: float) -> bool:
        """Keep a sample; False for one that cannot be true."""
        if not (LEAST_S <= seconds <= MOST_S and 0 <= x <= MOST_SIZE and 0 <= y <= MOST_SIZE):
            return False
        self.seen += 1
        size = (math.frexp(x)[1], math.frexp(y)[1] // 2)
        bucket = self._buckets.pop(size, None)
        if bucket is None:
            bucket = deque(maxlen=PER_SIZE)
        self._kept += len(bucket) < PER_SIZE
        bucket.append((x, y, seconds, float(self.seen)))
        self._buckets[size] = bucket
        if self._kept > MOST_SAMPLES:
            self._drop_one()
        return True

    def coefficients(self) -> Coefficients | None:
        """Of the law as far as it is known; fits anew where that is due."""
        if self.due:
            self._fit()
        if self._fitted is not None:
            return self._fitted
        return self._prior if self._measured else None

    def _drop_one(self) -> None:
        """The oldest sample of the size that was not met for longest."""
        size, bucket = next(iter(self._buckets.items()))
        bucket.popleft()
        self._kept -= 1
        if not bucket:
            del self._buckets[size]

    def _fit(self) -> None:
        if not self._measured and self.seen < LEAST_SAMPLES:
            self._next_fit = LEAST_SAMPLES
            return
        self._next_fit = self.seen + max(4, min(REFIT_EVERY, self.seen // 4))
        decay, newest = -math.log(2.0) / HALF_LIFE, self.seen
        law = self._fitted or self._prior
        rows = [
            (x, y, seconds, max(LEAST_WEIGHT, math.exp(decay * (newest - number))))
            for bucket in self._buckets.values()
            for x, y, seconds, number in _alike(bucket, law)
        ]
        prior = self._scaled_prior(rows)
        weight = PRIOR_WEIGHT if self._measured else SHAPE_WEIGHT
        anchors = [(x, y, max(_at(prior, x, y), LEAST_S), weight) for x, y in self._anchors]
        fitted, rounds = self._fitted or prior, _ROUNDS if self._fitted else _FIRST_ROUNDS
        for _ in range(rounds):
            before, fitted = fitted, _improved(fitted, rows, anchors) or prior
            if self._settled(before, fitted):
                break
        self._fitted = fitted

    def _settled(self, before: Coefficients, after: Coefficients) -> bool:
        pairs = ((_at(before, x, y), _at(after, x, y)) for x, y in self._anchors)
        return all(abs(new - old) <= _SETTLED * old for old, new in pairs)

    def _scaled_prior(self, rows: Sequence[_Row]) -> Coefficients:
        """The prior, as many times slower as the machine is now."""
        prior = self._prior
        ratios = [(seconds / max(_at(prior, x, y), LEAST_S), weight) for x, y, seconds, weight in rows]
        if self._measured:
            ratios.append((1.0, PRIOR_WEIGHT))
        scale = _weighted_median(ratios)
        return (prior[0] * scale, prior[1] * scale, prior[2] * scale)


def _at(law: Coefficients, x: float, y: float) -> float:
    return law[0] + law[1] * x + law[2] * y


def _alike(bucket: Sequence[_Row], law: Coefficients) -> Sequence[_Row]:
    """The samples of one size without those that are far off: told without trusting the law's level there."""
    if len(bucket) < 3:
        return bucket
    ratios = [row[2] / max(_at(law, row[0], row[1]), LEAST_S) for row in bucket]
    middle = median(ratios)
    return [row for row, ratio in zip(bucket, ratios, strict=True) if middle / FAR <= ratio <= middle * FAR]


def _weighted_median(values: list[tuple[float, float]]) -> float:
    values.sort()
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0:
            return value
    return values[-1][0]


def _improved(law: Coefficients, rows: Sequence[_Row], anchors: Sequence[_Row]) -> Coefficients | None:
    """One round: weights from the errors of `law`, then the least squares under them."""
    everything = [*rows, *anchors]
    predicted = [max(_at(law, x, y), LEAST_S) for x, y, _, _ in everything]
    errors = [abs(row[2] / at - 1.0) for row, at in zip(everything, predicted, strict=True)]
    # An anchor may be far off, as a sample may, but does not tell how much samples scatter.
    bound = _HUBER * max(_NORMAL * median(errors[: len(rows)]), _LEAST_SPREAD)
    return _least_squares(
        [
            (x, y, seconds, (weight if error <= bound else weight * bound / error) / (at * at))
            for (x, y, seconds, weight), at, error in zip(everything, predicted, errors, strict=True)
        ]
    )


def _least_squares(rows: Sequence[_Row]) -> Coefficients | None:
    """The non-negative solution, exactly: the best of the solutions on every set of coefficients."""
    w = wx = wy = wxx = wxy = wyy = ws = wsx = wsy = 0.0
    for x, y, seconds, weight in rows:
        by_x, by_y = weight * x, weight * y
        w += weight
        wx += by_x
        wy += by_y
        wxx += by_x * x
        wxy += by_x * y
        wyy += by_y * y
        ws += weight * seconds
        wsx += by_x * seconds
        wsy += by_y * seconds
    sizes = [math.sqrt(square) for square in (w, wxx, wyy)]
    if not all(map(math.isfinite, (*sizes, ws, wsx, wsy))):
        return None
    # In units in which the diagonal is 1: x is a thousand times, its square a million times the constant.
    used = [index for index in range(3) if sizes[index] > 0]
    matrix = ((w, wx, wy), (wx, wxx, wxy), (wy, wxy, wyy))
    units = [size or 1.0 for size in sizes]
    scaled = [[matrix[i][j] / (units[i] * units[j]) for j in range(3)] for i in range(3)]
    right = [value / unit for value, unit in zip((ws, wsx, wsy), units, strict=True)]
    best: tuple[float, dict[int, float]] | None = None
    for count in range(len(used), 0, -1):
        for chosen in combinations(used, count):
            found = _solved(scaled, right, chosen)
            if found is None or min(found) < 0:
                continue
            gain = sum(right[i] * value for i, value in zip(chosen, found, strict=True))
            if best is None or gain > best[0]:
                best = gain, dict(zip(chosen, found, strict=True))
        if best is not None and count == len(used):
            break  # nothing is at its bound: no smaller set can be better
    if best is None:
        return None
    f, g, h = (best[1].get(i, 0.0) / units[i] for i in range(3))
    return (f, g, h) if 0.0 < f + g + h < math.inf else None


def _solved(
    matrix: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """The chosen unknowns by Gauss; None where the samples cannot tell them apart.  The diagonal is 1."""
    rows = [[*(matrix[i][j] for j in chosen), right[i]] for i in chosen]
    count = len(rows)
    for i in range(count):
        if rows[i][i] < _LEAST_DETERMINANT:  # positive definite matrices need no pivoting
            return None
        for j in range(i + 1, count):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, count + 1):
                rows[j][k] -= factor * rows[i][k]
    found = [0.0] * count
    for i in range(count - 1, -1, -1):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, count))
        found[i] = (rows[i][count] - known) / rows[i][i]
    return found
