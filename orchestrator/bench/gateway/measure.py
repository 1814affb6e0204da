"""What is measured of one gateway, one round at a time.  Every loop is bounded by counts and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.bench.gateway import proc
from orchestrator.bench.gateway.load import Answer, Client, clients, each_asks
from orchestrator.bench.gateway.running import Subject
from orchestrator.bench.gateway.wire import Ask, Route

Figures = dict[str, float]
ANSWER_TOKENS = 200
"""Of a whole answer."""
TTFT_STEP_US = 2000
QUIET_S = 0.003
"""Between two requests at light load."""
HOLD_US = 250_000
"""Keeps as many requests open at once as connections are to be pooled."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything; times in microseconds of the mock's decode step."""

    route: Route = Route.CHAT
    streams: int = 16
    event_tokens: int = 400
    step_us: int = 5000
    flood_tokens: int = 2000
    requests: int = 800
    ttft_requests: int = 200
    pools: tuple[int, ...] = (1, 16, 64, 256)
    pool_requests: int = 512
    open_streams: int = 2000
    open_tokens: int = 16
    open_step_us: int = 1_500_000
    limit_s: float = 60.0
    """For any single answer."""


QUICK = Plan(
    event_tokens=200,
    flood_tokens=800,
    requests=320,
    ttft_requests=60,
    pools=(1, 256),
    pool_requests=256,
    open_streams=300,
    open_tokens=8,
    open_step_us=1_000_000,
)


class Window:
    """CPU time and events while every stream relays: from all past `low` events to the first past `high`."""

    def __init__(self, streams: int, low: int, high: int, cpu_s: Callable[[], float]) -> None:
        self._streams, self._low, self._high = streams, low, high
        self._cpu_s = cpu_s
        self._counts: dict[Client, int] = {}
        self._begun: tuple[float, int] | None = None
        self.figures: tuple[float, int] | None = None
        """CPU seconds and events of the window, once it is over."""

    def seen(self, client: Client, events: int) -> None:
        """See `load.Seen`."""
        self._counts[client] = events
        if self.figures is not None:
            return
        if self._begun is None:
            if len(self._counts) == self._streams and min(self._counts.values()) >= self._low:
                self._begun = self._cpu_s(), sum(self._counts.values())
        elif events >= self._high:
            cpu_s, total = self._begun
            self.figures = self._cpu_s() - cpu_s, sum(self._counts.values()) - total


async def event(subject: Subject, plan: Plan) -> Figures:
    """CPU per relayed event; one event a decode step on each stream."""
    return await _relayed(subject, plan, Ask(plan.route, True, plan.event_tokens, plan.step_us))


async def flood(subject: Subject, plan: Plan) -> Figures:
    """The same from shards that write as fast as they are read: waiting events are joined."""
    figures = await _relayed(subject, plan, Ask(plan.route, True, plan.flood_tokens))
    return {f"flood_{name}": value for name, value in figures.items()}


async def _relayed(subject: Subject, plan: Plan, ask: Ask) -> Figures:
    async with clients(subject.port, plan.streams) as asking:
        await each_asks(asking, Ask(plan.route, True, 8), plan.limit_s)
        window = Window(plan.streams, ask.tokens // 10, ask.tokens * 9 // 10, subject.cpu_s)
        begun_s = subject.cpu_s()
        answers = await each_asks(asking, ask, plan.limit_s, seen=window.seen)
        took_s = subject.cpu_s() - begun_s
    events = sum(answer.events for answer in answers)
    cpu_s, inside = window.figures or (took_s, events)
    return {
        "event_us": cpu_s / inside * 1e6,
        "event_with_opening_us": took_s / events * 1e6,
        "events_per_read": events / sum(answer.reads for answer in answers),
    }


async def request(subject: Subject, plan: Plan) -> Figures:
    """CPU per whole answer of 200 tokens, several requests at once."""
    ask = Ask(plan.route, False, ANSWER_TOKENS)
    async with clients(subject.port, plan.streams) as asking:
        await each_asks(asking, ask, plan.limit_s, 4)
        before = {name: proc.cpu_s([pid]) for name, pid in subject.beside.items()}
        figures = {"request_us": await _per_request(subject, asking, ask, plan, plan.requests)}
        for name, begun_s in before.items():
            took_s = proc.cpu_s([subject.beside[name]]) - begun_s
            figures[f"{name}_us"] = took_s / _rounded(plan.requests, len(asking)) * 1e6
    return figures


async def first_token(port: int, plan: Plan) -> list[float]:
    """Seconds to the first event, of requests that come one at a time."""
    ask = Ask(plan.route, True, 3, TTFT_STEP_US)
    async with clients(port, 1) as asking:
        took: list[Answer] = await each_asks(asking, ask, plan.limit_s, 5)
        took.clear()
        for _ in range(plan.ttft_requests):
            await asyncio.sleep(QUIET_S)
            took += await each_asks(asking, ask, plan.limit_s)
    return [answer.first_s for answer in took]


async def pool(subject: Subject, plan: Plan) -> Figures:
    """CPU per whole answer with that many connections to the shards pooled.

    `busy_N_us`: N requests at once; `idle_N_us`: one at a time, the others' connections idle.
    """
    ask, held = (Ask(plan.route, False, ANSWER_TOKENS, hold_us=hold_us) for hold_us in (0, HOLD_US))
    figures: Figures = {}
    for count in plan.pools:
        async with clients(subject.port, count) as asking:
            await each_asks(asking, held, plan.limit_s)
            figures[f"busy_{count}_us"] = await _per_request(subject, asking, ask, plan, plan.pool_requests)
        async with clients(subject.port, 1) as asking:
            requests = plan.pool_requests // 4
            figures[f"idle_{count}_us"] = await _per_request(subject, asking, ask, plan, requests)
    return figures


class Crowd:
    """How many streams are open at once, and the most memory the gateway took meanwhile."""

    SAMPLE_EVERY = 50

    def __init__(self, tokens: int, rss_bytes: Callable[[], int]) -> None:
        self._tokens = tokens
        self._rss_bytes = rss_bytes
        self._open: set[Client] = set()
        self.most_open = 0
        self.most_bytes = 0

    def seen(self, client: Client, events: int) -> None:
        """See `load.Seen`."""
        if events >= self._tokens:
            self._open.discard(client)
            return
        self._open.add(client)
        if len(self._open) > self.most_open:
            self.most_open = len(self._open)
            if self.most_open % self.SAMPLE_EVERY == 0:
                self.most_bytes = max(self.most_bytes, self._rss_bytes())


async def open_streams(subject: Subject, plan: Plan) -> Figures:
    """Memory of many streams that are open at the same time and slow."""
    async with clients(subject.port, plan.streams) as asking:
        await each_asks(asking, Ask(plan.route, True, 20), plan.limit_s, 4)
    before = subject.rss_bytes()
    crowd = Crowd(plan.open_tokens, subject.rss_bytes)
    ask = Ask(plan.route, True, plan.open_tokens, plan.open_step_us)
    async with clients(subject.port, plan.open_streams) as asking:
        await each_asks(asking, ask, plan.limit_s, seen=crowd.seen)
    grown_bytes = max(0, crowd.most_bytes - before)
    return {
        "open_at_once": float(crowd.most_open),
        "not_open_at_once": float(plan.open_streams - crowd.most_open),
        "rss_per_stream_kb": grown_bytes / crowd.most_open / 1000,
    }


async def _per_request(subject: Subject, asking: list[Client], ask: Ask, plan: Plan, requests: int) -> float:
    """CPU microseconds."""
    times = _rounded(requests, len(asking)) // len(asking)
    begun_s = subject.cpu_s()
    answers = await each_asks(asking, ask, plan.limit_s, times)
    return (subject.cpu_s() - begun_s) / len(answers) * 1e6


def _rounded(requests: int, clients_: int) -> int:
    """So many requests that every client asks as often as the others, at least once."""
    return max(1, requests // clients_) * clients_


def percentiles(took_s: list[float]) -> Figures:
    """p50 and p99 of times to first token, in milliseconds."""
    ordered = sorted(took_s)
    return {
        "ttft_p50_ms": ordered[len(ordered) // 2] * 1000,
        "ttft_p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000,
    }


def added(took_s: list[float], direct: Figures) -> Figures:
    """What a gateway adds to the mock's own times."""
    through = percentiles(took_s)
    return {f"added_{name}": through[name] - direct[name] for name in direct} | through
