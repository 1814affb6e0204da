"""A shard in virtual time, as TGI v3's router and server behave: first in first out, one step at a time.

    idle -> prefill of a batch -> [ maybe prefill of a joining batch -> decode of all ] -> idle

Without chunks a prefill stalls every running decode.  With them prompts are cut at the budget and the
running batch steps along.  An imported record costs a copy and a forward of one token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.bench.scheduler.clock import Clock
from orchestrator.core.cost import DecodeCost, PrefillCost

WAITING_SERVED_RATIO = 0.3
MAX_WAITING_STEPS = 20
"""TGI's defaults: who may join a running batch, without chunks."""

Told = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Build:
    """What an engine is made of."""

    prefill: PrefillCost
    decode: DecodeCost
    budget_tokens: int
    """`--max-batch-prefill-tokens`: prompts of one batch; a longer prompt goes alone."""
    slots: int = 256
    chunked: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One leg of a request."""

    prompt_tokens: int
    tokens: int
    """To generate here, the first one included."""
    first: Told
    """Is called with the first token, `ended` with the last."""
    ended: Told
    import_s: float | None = None
    """Copy of the record that it starts from; None for a prompt that is computed here."""
    started: Told = lambda: None
    """Is called when it leaves the queue."""
    computed_tokens: int = field(default=0, init=False)


Chunk = tuple[Work, int]
"""A request and how many of its prompt's tokens a step takes."""


@dataclass(slots=True)
class Batch:
    """One prefill that took place: prompts that were computed together."""

    prompts: int
    tokens: int


class Engine:
    """One shard.  `add` is all that happens to it from outside."""

    def __init__(self, clock: Clock, build: Build) -> None:
        self.batches: list[Batch] = []
        self._clock = clock
        self._build = build
        self._waiting: deque[Work] = deque()
        self._prefilling: list[Work] = []
        """Prompts of which chunks are left."""
        self._running: list[tuple[int, int, Work]] = []
        """A heap by the step that ends each."""
        self._context_tokens = 0
        self._steps = 0
        self._since_prefill = 0
        self._count = 0
        self._busy = False

    def add(self, work: Work) -> None:
        self._waiting.append(work)
        if not self._busy:
            self._busy = True
            # Not at once: what arrives at the same moment is in the queue when the router looks.
            self._clock.after(0.0, self._next)

    # --- the loop -------------------------------------------------------------------------------

    def _next(self) -> None:
        """The next iteration, or idle."""
        if self._build.chunked:
            self._step_together()
            return
        joining = self._joining()
        if not joining:
            self._decode()
            return
        self._since_prefill, alone = 1, not self._running
        self._note([(work, work.prompt_tokens) for work in joining])
        self._clock.after(self._prefill_s(joining), lambda: self._prefilled(joining, alone))

    def _prefilled(self, batch: Sequence[Work], alone: bool) -> None:
        """The first batch of a busy period may be joined before it decodes."""
        for work in batch:
            self._emit_first(work)
        if alone and self._running:
            self._next()
        else:
            self._decode()

    def _decode(self) -> None:
        if not self._running:
            self._busy = bool(self._waiting)
            if self._busy:
                self._next()
            return
        self._clock.after(self._decode_s(), self._decoded)

    def _decoded(self) -> None:
        self._since_prefill += 1
        self._advance()
        self._next()

    def _step_together(self) -> None:
        """Chunks of prompts, imports and all running sequences in one forward."""
        self._prefilling += self._take(self._build.budget_tokens - len(self._running), self._prefilling)
        chunks = self._chunks()
        if not chunks and not self._running:
            self._busy = False
            return
        self._note(chunks)
        self._clock.after(self._together_s(chunks), lambda: self._stepped(chunks))

    def _stepped(self, chunks: Sequence[Chunk]) -> None:
        self._advance()
        for work, tokens in chunks:
            work.computed_tokens += tokens
            if work.computed_tokens >= work.prompt_tokens:
                self._prefilling.remove(work)
                self._emit_first(work)
        self._next()

    # --- what is in a step ----------------------------------------------------------------------

    def _joining(self) -> list[Work]:
        running = len(self._running)
        patient = self._since_prefill < MAX_WAITING_STEPS
        if patient and len(self._waiting) < int(running * WAITING_SERVED_RATIO):
            return []
        return self._take(self._build.budget_tokens, ())

    def _take(self, budget_tokens: int, taken: Sequence[Work]) -> list[Work]:
        """The oldest waiting prompts that fit; the router counts an imported one like any other."""
        budget_tokens -= sum(work.prompt_tokens - work.computed_tokens for work in taken)
        found: list[Work] = []
        room = self._build.slots - len(self._running) - len(taken)
        while self._waiting and len(found) < room:
            prompt_tokens = self._waiting[0].prompt_tokens
            fits = budget_tokens > 0 if self._build.chunked else prompt_tokens <= budget_tokens
            if not fits and (found or self._build.chunked):
                break
            budget_tokens -= prompt_tokens
            found.append(self._waiting.popleft())
            found[-1].started()
        return found

    def _chunks(self) -> list[Chunk]:
        left = self._build.budget_tokens - len(self._running)
        chunks: list[Chunk] = []
        for work in self._prefilling:
            tokens = work.prompt_tokens - work.computed_tokens
            if work.import_s is None:
                tokens = min(tokens, left)
            if tokens > 0:
                chunks.append((work, tokens))
            left -= tokens
        return chunks

    def _emit_first(self, work: Work) -> None:
        work.first()
        if work.tokens <= 1:
            work.ended()
            return
        self._count += 1
        heapq.heappush(self._running, (self._steps + work.tokens - 1, self._count, work))
        self._context_tokens += work.prompt_tokens

    def _advance(self) -> None:
        """One more token for each running sequence."""
        self._steps += 1
        self._context_tokens += len(self._running)
        while self._running and self._running[0][0] <= self._steps:
            _, _, work = heapq.heappop(self._running)
            self._context_tokens -= work.prompt_tokens + work.tokens - 1
            work.ended()

    # --- what a step takes ----------------------------------------------------------------------

    def _prefill_s(self, batch: Sequence[Work]) -> float:
        """Prompts are computed together; the imported ones are a forward of one token each."""
        return self._computed_s([(work, work.prompt_tokens) for work in batch]) + self._imported_s(batch)

    def _imported_s(self, batch: Sequence[Work]) -> float:
        imported = [work for work in batch if work.import_s is not None]
        if not imported:
            return 0.0
        context = sum(work.prompt_tokens for work in imported)
        return _copies_s(imported) + self._build.decode.step_s(len(imported), context)

    def _decode_s(self) -> float:
        return self._build.decode.step_s(len(self._running), self._context_tokens)

    def _together_s(self, chunks: Sequence[Chunk]) -> float:
        """Weights are read once for all rows of a forward, so the fixed part counts once."""
        imported = [work for work, _ in chunks if work.import_s is not None]
        rows = len(self._running) + len(imported)
        if not rows:
            return self._computed_s(chunks)
        context = self._context_tokens + sum(work.prompt_tokens for work in imported)
        computed_s = self._computed_s(chunks)
        if computed_s:
            computed_s -= self._build.prefill.fixed_s
        return self._build.decode.step_s(rows, context) + computed_s + _copies_s(imported)

    def _computed_s(self, chunks: Sequence[Chunk]) -> float:
        """A chunk from k to m tokens of its prompt attends to m^2 - k^2."""
        mine = _of_computed(chunks)
        if not mine:
            return 0.0
        squares = sum((w.computed_tokens + count) ** 2 - w.computed_tokens**2 for w, count in mine)
        return self._build.prefill.seconds(sum(count for _, count in mine), squares)

    def _note(self, chunks: Sequence[Chunk]) -> None:
        if mine := _of_computed(chunks):
            self.batches.append(Batch(len(mine), sum(count for _, count in mine)))


def _of_computed(chunks: Sequence[Chunk]) -> list[Chunk]:
    return [(work, tokens) for work, tokens in chunks if work.import_s is None]


def _copies_s(imported: Sequence[Work]) -> float:
    return sum(work.import_s or 0.0 for work in imported)
