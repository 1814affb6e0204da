"""Prefill batches of one shard as they were: which first tokens came together, and what that batch took.

The gateway tells of a first token late and in any order, so a batch is held until every request that could
belong to it has been heard of.  "Could" is told by the order of events alone, so clocks need not agree:
what was granted after a batch's first token was told of is not in that batch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

SAME_INSTANT_S = 0.005
"""Between neighbours: the gateway reads the tokens of one batch one after the other."""
SPREAD_MOST_S = 0.025
"""Between the first and the last of them."""
HOLD_S = 30.0
"""A request that says nothing for so long no longer holds others up; its batch is given up."""
OPEN_MOST = 4096
MEAN_SHARE = 1 / 16
"""Of the latest batch in the recent mean."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class PrefillBatch:
    """One measured batch."""

    requests: int
    tokens: int
    squares: int
    """Sum of the squares of the prompts' tokens."""
    seconds: float


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class _First:
    """A first token: wall-clock seconds of its gateway."""

    first_s: float
    number: int
    """Of the request's grant, counted on this shard."""
    sent_s: float
    tokens: int
    horizon: int
    """Grants so far when it was told of."""
    told_s: float


@dataclass(frozen=True, slots=True)
class _Disturbance:
    """What kept the shard busy without telling when: numbers of the first and the last grant it can touch."""

    since: int
    until: int


_FIRST_S = attrgetter("first_s")


class Batches:
    """Of one incarnation of one shard."""

    def __init__(self) -> None:
        self._granted = 0
        self._open: dict[str, int] = {}
        """Handle -> number of its grant, of what has not told of its first token; the oldest first."""
        self._others: dict[str, int] = {}
        """The same of requests that decode here, as long as they run."""
        self._disturbed: deque[_Disturbance] = deque(maxlen=64)
        self._told: list[_First] = []
        """Sorted by time."""
        self._busy_until_s = 0.0
        self._mean: tuple[float, float] | None = None

    @property
    def mean(self) -> tuple[float, float] | None:
        """Requests and tokens of a batch, the recent mean; None before the first was seen."""
        return self._mean

    @property
    def idle(self) -> bool:
        """Nothing is known to be on the shard."""
        return not (self._open or self._others)

    def sent(self, handle: str) -> None:
        """A request will be prefilled here."""
        self._granted += 1
        self._open[handle] = self._granted
        if len(self._open) > OPEN_MOST:
            self._give_up_oldest()

    def decodes(self, handle: str) -> None:
        """A request will also decode here: prefill and its steps are not told apart."""
        self._granted += 1
        self._others[handle] = self._granted
        if len(self._others) > OPEN_MOST:
            self.unheard(next(iter(self._others)))

    def first_token(
        self, handle: str, first_token_s: float, prefill_s: float, prompt_tokens: int, now_s: float
    ) -> None:
        """The request's first token came then, `prefill_s` after it was sent."""
        number = self._open.pop(handle, None)
        if number is not None:
            sent_s = first_token_s - prefill_s
            one = _First(first_token_s, number, sent_s, prompt_tokens, self._granted, now_s)
            insort(self._told, one, key=_FIRST_S)

    def unheard(self, handle: str) -> None:
        """The request is over, and nothing tells what the shard did for it, or when."""
        since = self._open.pop(handle, None) or self._others.pop(handle, None)
        if since is not None:
            self._disturbed.append(_Disturbance(since, self._granted))

    def complete(self, now_s: float) -> list[PrefillBatch]:
        """Batches that are whole since the last call, in order."""
        found: list[PrefillBatch] = []
        while self._told:
            batch = self._earliest()
            horizon = min([one.horizon for one in batch])
            if self._missing(horizon):
                if now_s - min(one.told_s for one in batch) <= HOLD_S:
                    break
                while self._missing(horizon):
                    self._give_up_oldest()
            del self._told[: len(batch)]
            measured = self._measured(batch, horizon)
            if measured is not None:
                found.append(measured)
        return found

    def _earliest(self) -> list[_First]:
        """Neighbours in time; what was sent after the batch's first token is of a later one."""
        begin, last = self._told[0], self._told[0].first_s
        batch = [begin]
        for one in self._told[1:]:
            apart = one.first_s - last > SAME_INSTANT_S or one.first_s - begin.first_s > SPREAD_MOST_S
            if apart or one.sent_s >= begin.first_s:
                break
            batch.append(one)
            last = one.first_s
        return batch

    def _missing(self, horizon: int) -> bool:
        """Something that was granted before the batch's end is still to be heard of."""
        return bool(self._open) and next(iter(self._open.values())) <= horizon

    def _give_up_oldest(self) -> None:
        self.unheard(next(iter(self._open)))

    def _measured(self, batch: list[_First], horizon: int) -> PrefillBatch | None:
        """None where something else may have run between its beginning and its end."""
        first_s = batch[0].first_s
        seconds = first_s - max(self._busy_until_s, min([one.sent_s for one in batch]))
        self._busy_until_s = max(self._busy_until_s, first_s)
        oldest = min([one.number for one in batch])
        if seconds <= 0 or self._disturbed_between(oldest, horizon):
            return None
        tokens = sum([one.tokens for one in batch])
        self._averaged(len(batch), tokens)
        return PrefillBatch(len(batch), tokens, sum([one.tokens * one.tokens for one in batch]), seconds)

    def _disturbed_between(self, oldest: int, horizon: int) -> bool:
        if self._others and next(iter(self._others.values())) <= horizon:
            return True
        return any(each.since <= horizon and each.until >= oldest for each in self._disturbed)

    def _averaged(self, requests: int, tokens: int) -> None:
        mean = self._mean or (float(requests), float(tokens))
        self._mean = (
            mean[0] + (requests - mean[0]) * MEAN_SHARE,
            mean[1] + (tokens - mean[1]) * MEAN_SHARE,
        )
