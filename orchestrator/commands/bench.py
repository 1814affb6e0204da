"""`bench`: ratios on this machine, each with the conditions it was measured under."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.bench.interference import Plan, Result
from orchestrator.bench.interference import run as run_interference
from orchestrator.bench.interference.plot import plot
from orchestrator.bench.interference.stats import Estimate
from orchestrator.config import Loaded
from orchestrator.deployment.logging import json_log
from orchestrator.deployment.progress import Progress, for_terminal
from orchestrator.deployment.reach import Reach, client_key
from orchestrator.deployment.state import State
from orchestrator.embedded.weights import pick_dtype, resolve_model
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.bench.scheduler.parts import Part
    from orchestrator.bench.scheduler.run import Wanted

QUICK = Plan(model=Path(), dtype="")
LONG = replace(QUICK, seconds=45.0)
_CAPTION = (
    "Milliseconds, p50 and p99.  TPOT: between two tokens of a running stream.  TTFT: of an arriving "
    "prompt, 2nd: from its first to its second token.  tok/s: of the streams.  n: prompts seen."
)


def bench_shard(loaded: Loaded, *, rounds: int, as_json: bool) -> None:
    """The engine against a bare transformers loop."""
    from orchestrator.bench.shard import measure

    model, dtype = _model(loaded)
    rows = measure(model, dtype, rounds=rounds)
    _show(rows, "engine against a bare transformers loop, CPU time", as_json)


def bench_bridge(*, sizes_mib: Sequence[int], rounds: int, as_json: bool) -> None:
    """The arena against memcpy and a file per record."""
    from orchestrator.bench.bridge import measure

    rows = measure([size << 20 for size in sizes_mib], rounds)
    _show(rows, "arena against memcpy (1.0) and a safetensors file per record", as_json)


def bench_pull(*, sizes_mib: Sequence[int], rounds: int, serve: str, peer: str, as_json: bool) -> None:
    """A record between hosts against memory, sockets and what others use; `serve` is the other host's end."""
    from orchestrator.bench import pull, pull_peer

    if serve:
        asyncio.run(pull_peer.serve(*_address("--serve", serve)))
        return
    if peer:
        _address("--from", peer)
    rows = pull.measure([size << 20 for size in sizes_mib], rounds, peer)
    _show(rows, "a record between hosts against memcpy and a raw socket", as_json)


def bench_control(*, shards: int, seconds: float, as_json: bool) -> None:
    """A conductor that only keeps shards."""
    from orchestrator.bench.control import measure

    with json_log(Path(os.devnull)):
        row = asyncio.run(measure(shards, seconds)).to_dict()
    if as_json:
        typer.echo(json.dumps(row))
    else:
        _show([row], "a conductor over shards that are only names", as_json=False)


def bench_relay(state: State, *, rounds: int, requests: int, as_json: bool) -> None:
    """Time to first token against the prefill shard alone, and memory over `requests` requests."""
    import psutil

    from orchestrator.bench import relay

    reach = Reach.of(state)
    with reach.blocking_admin(relay.TIMEOUT_S) as admin:
        shard_url = relay.prefill_url(admin)
    memory: list[dict[str, Any]] = []
    with reach.blocking(relay.TIMEOUT_S, client_key(None, os.environ)) as gateway:
        rows = [relay.time_to_first_token(gateway, shard_url, rounds)]
        if requests:
            children = psutil.Process(state.pid).children()
            pids = {child.name() + f" {child.pid}": child.pid for child in children}
            memory = relay.memory(gateway, pids, first=max(1, requests // 5), last=requests)
    if as_json:
        typer.echo(json.dumps({"time_to_first_token": rows[0], "memory": memory}))
        return
    _show(rows, "time to first token, separated against the prefill shard alone", as_json=False)
    if memory:
        _show(memory, f"memory after {max(1, requests // 5)} and {requests} requests", as_json=False)


def bench_interference(loaded: Loaded, *, long: bool, dtype: str, out: Path | None, as_json: bool) -> None:
    """What mixing the phases costs and what separation buys."""
    console = Console(stderr=True)
    model, _ = _model(loaded)
    plan = replace(LONG if long else QUICK, model=model, dtype=dtype)
    results = asyncio.run(run_interference(plan, lambda text: console.print(f"  {text}", style="dim")))
    report = {"conditions": _conditions(plan), "results": [result.to_dict() for result in results]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "interference.json").write_text(json.dumps(report, indent=1) + "\n")
        plot(results, out / "interference.png", title=_title(plan))
    if as_json:
        typer.echo(json.dumps(report))
        return
    Console().print(_table(results, _title(plan)))
    if out is not None:
        typer.echo(f"Wrote {out / 'interference.json'} and {out / 'interference.png'}")


def bench_gateway(*, only: str, measures: str, rounds: int, quick: bool, route: str, as_json: bool) -> None:
    """CPU time per unit of the gateway and its peers; `only` and `measures` are lists with commas."""
    from orchestrator.bench.gateway import measure
    from orchestrator.bench.gateway.report import show
    from orchestrator.bench.gateway.run import run
    from orchestrator.bench.gateway.wire import Route

    routes = {str(one): one for one in Route}
    if route not in routes:
        raise ConfigError(f"--route must be {', '.join(routes)}, not {route!r}.")
    plan = replace(measure.QUICK if quick else measure.Plan(), route=routes[route])
    console = Console(stderr=True)
    with console.status("Starting") as status:
        report = run(_names(only), _names(measures), rounds, plan, status.update)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        show(report, Console())
    if report.failures:
        raise typer.Exit(1)


def bench_scheduler(loaded: Loaded, wanted: Wanted, *, as_json: bool) -> None:
    """Client, conductor and policies, in parts; `loaded` is of the pair that part `break-even` starts."""
    from orchestrator.bench.scheduler.report import show
    from orchestrator.bench.scheduler.run import conditions

    console = Console(stderr=True)
    said = conditions(wanted)
    with console.status("Starting") as status, json_log(Path(os.devnull)):
        parts = asyncio.run(_measured(loaded, wanted, status.update, None if as_json else show))
    said["load_average_at_end"] = round(os.getloadavg()[0], 2)
    if as_json:
        typer.echo(json.dumps({"conditions": said, "parts": {part.name: part.to_dict() for part in parts}}))


async def _measured(
    loaded: Loaded,
    wanted: Wanted,
    say: Callable[[str], None],
    show: Callable[[Part, Console], None] | None,
) -> list[Part]:
    """Each part is shown as soon as it is there."""
    from orchestrator.bench.scheduler.run import run

    parts = []
    async for part in run(wanted, lambda: _pair(loaded, _Saying(say)), say):
        parts.append(part)
        if show is not None:
            show(part, Console())
    return parts


class _Saying:
    """The steps of a start, in the line of the bench that runs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def step(self, text: str) -> None:
        self._say(f"break-even: {text}")

    def done(self, text: str) -> None:
        """The next step says enough."""

    def close(self) -> None:
        """Nothing is held."""


@asynccontextmanager
async def _pair(loaded: Loaded, progress: Progress) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a deployment that is started for this and gone afterwards."""
    from orchestrator.commands.sides import temporary_order
    from orchestrator.deployment.start import deployed

    key = client_key(loaded.settings.gateway.keys_file, os.environ)
    with temporary_order(loaded, progress, calibrate=True) as order:
        async with deployed(order, progress) as running, Reach.of(running.state).client(60.0, key) as gateway:
            yield gateway


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _address(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{flag} must be HOST:PORT, not {text!r}.")
    return host.strip("[]"), int(port)


def _model(loaded: Loaded) -> tuple[Path, str]:
    wanted, progress = loaded.settings.model, for_terminal()
    model = resolve_model(wanted.id, wanted.revision, wanted.cache, wanted.token_file, progress.done)
    return model.path, pick_dtype(wanted.dtype)


def _conditions(plan: Plan) -> dict[str, Any]:
    return {
        "version": version("tgi-orchestrator"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu": _cpu_name(),
        "cores": 2,
        "dtype": plan.dtype,
        "streams": plan.streams,
        "prompt_tokens": plan.prompt_tokens,
        "seconds_per_phase": plan.seconds,
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _title(plan: Plan) -> str:
    return f"{plan.streams} streams, prompts of {plan.prompt_tokens} tokens, {plan.dtype}, two cores"


def _table(results: Sequence[Result], title: str) -> Table:
    """Fits 80 columns; one section per prefill share."""
    table = Table(title=title, caption=_CAPTION, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("prefill", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for name in ("TPOT", "p99 [95 %]", "TTFT", "p99", "2nd", "tok/s", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for result in results:
        if last is not None and result.prefill_share != last:
            table.add_section()
        table.add_row(
            "" if result.prefill_share == last else f"{result.prefill_share:.0%}",
            result.way,
            _text(result.tpot_p50),
            _text(result.tpot_p99, interval=True),
            _text(result.ttft_p50),
            _text(result.ttft_p99),
            _text(result.second_gap_p50),
            f"{result.stream_tokens_per_s:.0f}",
            str(result.prompts),
        )
        last = result.prefill_share
    return table


def _text(value: Estimate, *, interval: bool = False) -> str:
    if value.value_ms is None:
        return "-"
    text = f"{value.value_ms:.0f}"
    return f"{text} [{value.low_ms:.0f}-{value.high_ms:.0f}]" if interval else text


def _show(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    """One column a measurement, one line a figure: narrow enough for any terminal."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=title, box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    for _ in rows:
        table.add_column(justify="right")
    for name in rows[0]:
        table.add_row(name.rstrip("_").replace("_", " "), *(_cell(row[name]) for row in rows))
    Console().print(table)


def _cell(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 100 else _plain(value)


def _plain(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
