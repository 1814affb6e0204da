"""Who decoded together on one shard: the mean batch and context that a request had beside it.

A request's decode is known exactly only when it is over (a whole answer says nothing before), so samples
wait a moment and then look back at everybody's lives.  All times are seconds of the caller's clock, and
only differences count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HOLD_S = 1.5
"""Until a sample is taken: whole answers tell of their decode a second after it began, or at its end."""
EVERY_S = 0.25
"""Between two samples of one shard: more would tell nothing new."""
PAST_MOST = 512
OPEN_MOST = 4096
LEAST_STEPS = 4
"""Of a request whose time per token is worth something."""


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """What one request's steps took, and what ran beside it."""

    steps: int
    seconds: float
    batch: float
    """Sequences, the mean over the request's decode, itself included."""
    context_tokens: float
    """Of all of them together, likewise."""
    prefills: int = 0
    """That held its steps up, on a shard that does both: how many, their tokens, the sum of the squares."""
    prefill_tokens: int = 0
    prefill_squares: int = 0


@dataclass(slots=True)
class Life:
    """A request's decode on a shard."""

    begun_s: float
    context_tokens: int
    """At its beginning."""
    prefill_tokens: int = 0
    """Computed on this shard just before; 0 for an imported record."""
    ended_s: float = 0.0
    tokens: int = 0
    """Generated until then."""
    give_up_s: float = 0.0
    """An open one is no longer believed in after this."""


class Lives:
    """Of one incarnation of one shard."""

    def __init__(self) -> None:
        self._open: dict[str, Life] = {}
        self._past: deque[Life] = deque()
        """In the order of their ends."""
        self._forgotten_s = float("-inf")
        """Lives that ended before this may be missing."""
        self._waiting: deque[tuple[Life, int]] = deque()
        self._sampled_s = float("-inf")

    @property
    def idle(self) -> bool:
        """Nothing is known to decode here."""
        return not self._open

    def begin(self, handle: str, life: Life) -> None:
        """A request runs here from now on, as far as is known."""
        self._open[handle] = life
        if len(self._open) > OPEN_MOST:
            del self._open[next(iter(self._open))]

    def drop(self, handle: str) -> None:
        """It did not decode here."""
        self._open.pop(handle, None)

    def end(self, handle: str, life: Life, steps: int) -> None:
        """A request is over, and this was its life; `steps` is 0 where they cannot be told from the rest."""
        self._open.pop(handle, None)
        self._past.append(life)
        if len(self._past) > PAST_MOST:
            self._forgotten_s = self._past.popleft().ended_s
        enough = steps >= LEAST_STEPS and life.ended_s > life.begun_s
        if enough and life.ended_s - self._sampled_s >= EVERY_S:
            self._sampled_s = life.ended_s
            self._waiting.append((life, steps))

    def samples(self, now_s: float) -> list[DecodeSample]:
        """Those that have waited long enough."""
        found: list[DecodeSample] = []
        while self._waiting and now_s - self._waiting[0][0].ended_s >= HOLD_S:
            life, steps = self._waiting.popleft()
            if life.begun_s >= self._forgotten_s:
                found.append(self._sample(life, steps, now_s))
        return found

    def _sample(self, own: Life, steps: int, now_s: float) -> DecodeSample:
        """Looks at every life that overlaps with `own`: written for speed, a hundred may."""
        begun_s, ended_s = own.begun_s, own.ended_s
        took_s = ended_s - begun_s
        together_s = context_s = 0.0
        prefilled: list[int] = []
        for life in self._beside(own, now_s):
            since_s = life.begun_s if life.begun_s > begun_s else begun_s
            until_s = life.ended_s if life.ended_s < ended_s else ended_s
            shared_s, lasted_s = until_s - since_s, life.ended_s - life.begun_s
            grown = life.tokens * (since_s + shared_s / 2 - life.begun_s) / lasted_s if lasted_s > 0 else 0.0
            together_s += shared_s
            context_s += shared_s * (life.context_tokens + grown)
            if life.prefill_tokens and since_s > begun_s:  # never `own`
                prefilled.append(life.prefill_tokens)
        squares = sum(n * n for n in prefilled)
        return DecodeSample(
            steps, took_s, together_s / took_s, context_s / took_s, len(prefilled), sum(prefilled), squares
        )

    def _beside(self, own: Life, now_s: float) -> list[Life]:
        begun_s, ended_s = own.begun_s, own.ended_s
        found: list[Life] = []
        for life in reversed(self._past):
            if life.ended_s <= begun_s:
                break
            if life.begun_s < ended_s:
                found.append(life)
        pace = own.tokens / (ended_s - begun_s)
        stale: list[str] = []
        for handle, life in self._open.items():
            if life.give_up_s < now_s:
                stale.append(handle)
            elif life.begun_s < ended_s:
                # As if it had ended now, with as many tokens as `own` would have by then.
                life.ended_s, life.tokens = now_s, int(pace * (now_s - life.begun_s))
                found.append(life)
        for handle in stale:
            del self._open[handle]
        return found
