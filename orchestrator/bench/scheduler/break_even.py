"""Part `break-even`: what a live deployment chooses for typical requests, and what both ways really take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import httpx

from orchestrator.bench.scheduler.live import AUTO, Answer, Asking, Background, decoding
from orchestrator.bench.scheduler.parts import Part, Row, Verdict
from orchestrator.core.ticket import Choice

Say = Callable[[str], None]
QUIET_S = 1.0
"""Undisturbed background before each round: what a token takes then."""
BACKGROUND_TOKENS = 900
EQUAL = 0.1
"""Costs that differ by less than this share are one as good as the other."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request, and how many streams decode meanwhile."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    background: int = 0


CASES = (
    Case("short, short answer", 24, 8),
    Case("short, long answer", 24, 48),
    Case("medium, short answer", 240, 8),
    Case("long, short answer", 800, 8),
    Case("short beside 4", 24, 24, background=4),
    Case("medium beside 4", 240, 8, background=4),
    Case("medium, long answer beside 4", 240, 32, background=4),
    Case("long beside 4", 800, 8, background=4),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How often; `warm_up` requests of each way teach the cost model first."""

    rounds: int = 3
    warm_up: int = 6
    cases: Sequence[Case] = CASES


QUICK = Plan(rounds=1, warm_up=4)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and what it did to the background.  Seconds."""

    answer: Answer
    harm_s: float
    longest_gap_s: float

    @property
    def cost_s(self) -> float:
        """What the cost model minimises: until its own last token, and what others lose."""
        return self.answer.took_s + self.harm_s


@dataclass(slots=True)
class Outcome:
    """All rounds of a case, by the way that was asked for."""

    case: Case
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def cost_s(self, choice: str) -> float:
        return median(one.cost_s for one in self.seen[choice])

    def chosen(self) -> str:
        """What `auto` took, mostly."""
        routes = [one.answer.route for one in self.seen[AUTO]]
        return max(set(routes), key=routes.count)

    def right(self) -> bool:
        """It was the cheaper one, or as good."""
        mine, other = self.cost_s(self.chosen()), self.cost_s(_other(self.chosen()))
        return mine <= other * (1 + EQUAL)

    def row(self) -> Row:
        """One line of the table; milliseconds."""
        auto = self.seen[AUTO][-1].answer
        row: dict[str, str | float | int | None] = {
            "request": self.case.name,
            "chose": self.chosen(),
            "reason": auto.reason,
            "right": "yes" if self.right() else "NO",
        }
        for choice in Choice:
            ways = self.seen[choice]
            foreseen = [
                one.answer.predicted[choice] for one in self.seen[AUTO] if choice in one.answer.predicted
            ]
            row[f"{choice} foreseen"] = round(median(foreseen) * 1e3) if foreseen else None
            row[f"{choice} took"] = round(median(one.answer.took_s for one in ways) * 1e3)
            row[f"{choice} first"] = round(median(one.answer.ttft_s for one in ways) * 1e3)
            row[f"{choice} harm"] = round(median(one.harm_s for one in ways) * 1e3)
            row[f"{choice} gap"] = round(median(one.longest_gap_s for one in ways) * 1e3)
        return row


def _other(choice: str) -> str:
    return Choice.MIXED if choice == Choice.SEPARATED else Choice.SEPARATED


async def measure(gateway: httpx.AsyncClient, plan: Plan, say: Say = lambda _: None) -> Part:
    """On a deployment of one prefill and one decode shard.  Raises Unanswered and Unreachable."""
    asking = Asking(gateway)
    say("break-even: warming up")
    await _warm_up(asking, plan)
    outcomes = []
    for case in plan.cases:
        say(f"break-even: {case.name}")
        outcomes.append(await _measured(asking, case, plan.rounds))
    right = sum(outcome.right() for outcome in outcomes)
    return Part(
        "break-even",
        "what was chosen and what both ways take; ms, medians",
        [outcome.row() for outcome in outcomes],
        [Verdict("requests that were served the cheaper way", right, len(outcomes), at_least=True)],
        {
            **{name: value for name, value in asdict(plan).items() if name != "cases"},
            "cases": [asdict(case) for case in plan.cases],
            "as_good_as_share": EQUAL,
        },
        notes=(
            "took: to the last token; harm: what the other streams lost together; gap: their longest.",
            "Cheaper: took + harm, which is what the cost model minimises; within 10 % both are right.",
        ),
    )


async def _warm_up(asking: Asking, plan: Plan) -> None:
    """Both ways with each kind of prompt: what was never measured is predicted by guess."""
    for number in range(plan.warm_up):
        case = plan.cases[number % len(plan.cases)]
        for choice in Choice:
            await asking.ask(asking.body(case.prompt_tokens, min(case.answer_tokens, 16)), choice)


async def _measured(asking: Asking, case: Case, rounds: int) -> Outcome:
    outcome = Outcome(case, {way: [] for way in (*Choice, AUTO)})
    ways = list(outcome.seen)
    async with decoding(asking, case.background, BACKGROUND_TOKENS) as background:
        for number in range(rounds):
            for way in (*ways[number % 3 :], *ways[: number % 3]):
                outcome.seen[way].append(await _one(asking, case, way, background))
    return outcome


async def _one(asking: Asking, case: Case, way: str, background: Background) -> Seen:
    quiet_s = time.perf_counter()
    if case.background:
        await asyncio.sleep(QUIET_S)
    begun_s = time.perf_counter()
    answer = await asking.ask(asking.body(case.prompt_tokens, case.answer_tokens), way)
    gap_s = background.quiet_gap_s(quiet_s, begun_s)
    # A step that the request held up may end after it.
    end_s = time.perf_counter()
    return Seen(answer, background.harm_s(begun_s, end_s, gap_s), background.longest_gap_s(begun_s, end_s))
