"""Ask every case of both sides, one by one and then many at once, and collect the verdicts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from orchestrator.verify.answer import IMPORT_HIT, Answer
from orchestrator.verify.asking import SPLIT_HEADERS, ask
from orchestrator.verify.cases import Case
from orchestrator.verify.compare import first_difference, largest_logprob_gap, path_problem
from orchestrator.verify.prepare import CannotPrepare, prepare


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one case.  `problem` is empty when the answers are identical and imported."""

    case: str
    via: str
    problem: str = ""
    skipped: str = ""
    """Why this model offers no such request; nothing was compared then."""
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    finish_reason: str = ""
    route: str = ""
    imported: str = ""
    needs_import: bool = False
    logprob_gap: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Asked:
    """A case that was answered, kept for the pass with many at once."""

    case: Case
    separated: Answer


@dataclass(frozen=True, slots=True)
class Sides:
    """Where the two answers to one case come from, and how far logprobs may part."""

    separated: httpx.AsyncClient
    reference: httpx.AsyncClient
    tolerance: float
    splits: bool = True
    """The deployment has both phases: what can be split must be."""


Seen = Callable[[Verdict], None]


def judge(
    case: Case, separated: Answer, reference: Answer, tolerance: float, *, splits: bool = True
) -> Verdict:
    """Compare two answers, how the first was served, and what the case itself expects."""
    splits = splits and not case.whole
    return Verdict(
        case=case.name,
        via=case.via.value,
        problem=_problem(case, separated, reference, tolerance, splits=splits),
        prompt_tokens=separated.prompt_tokens,
        generated_tokens=separated.generated_tokens,
        finish_reason=separated.finish_reason,
        route=separated.route.choice,
        imported=separated.route.imported,
        needs_import=splits and separated.generated_tokens >= 2,
        logprob_gap=largest_logprob_gap(separated, reference),
    )


def _problem(case: Case, separated: Answer, reference: Answer, tolerance: float, *, splits: bool) -> str:
    if difference := first_difference(separated, reference, tolerance):
        return str(difference)
    if not separated.complete:
        return f"both sides refuse it: status {separated.status}, {separated.error}"
    if case.finish and separated.finish_reason != case.finish:
        return f"it should end with {case.finish!r}, both sides end with {separated.finish_reason!r}"
    if case.generated is not None and separated.generated_tokens != case.generated:
        return f"it should end after {case.generated} tokens, both sides give {separated.generated_tokens}"
    return (path_problem(separated) or "") if splits else ""


async def one_by_one(cases: Sequence[Case], sides: Sides, seen: Seen) -> tuple[list[Verdict], list[Asked]]:
    """Each case of both sides, never two requests at a time."""
    verdicts: list[Verdict] = []
    asked: list[Asked] = []
    for case in cases:
        try:
            ready = await prepare(case, sides.reference)
        except CannotPrepare as reason:
            verdicts.append(Verdict(case.name, case.via.value, skipped=str(reason)))
        else:
            reference = await ask(sides.reference, ready)
            separated = await ask(sides.separated, ready, SPLIT_HEADERS)
            verdicts.append(judge(ready, separated, reference, sides.tolerance, splits=sides.splits))
            asked.append(Asked(ready, separated))
        seen(verdicts[-1])
    return verdicts, asked


async def all_at_once(asked: Sequence[Asked], at_once: int, sides: Sides, seen: Seen) -> list[Verdict]:
    """The greedy cases again, `at_once` of them in flight, each against its own one-by-one answer."""
    greedy = [item for item in asked if item.case.greedy and item.separated.complete]
    if not greedy:
        return []
    chosen = list(itertools.islice(itertools.cycle(greedy), max(at_once, len(greedy))))
    gate = asyncio.Semaphore(at_once)

    async def again(item: Asked) -> Verdict:
        async with gate:
            answer = await ask(sides.separated, item.case, SPLIT_HEADERS)
        verdict = judge(item.case, answer, item.separated, sides.tolerance, splits=sides.splits)
        seen(verdict)
        return verdict

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(again(item)) for item in chosen]
    return [task.result() for task in tasks]


def imports_seen(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """(requests that need an imported record, requests that the gateway says were served by one)."""
    needed = sum(verdict.needs_import for verdict in verdicts)
    hits = sum(verdict.imported == IMPORT_HIT for verdict in verdicts)
    return needed, hits
