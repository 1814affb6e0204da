"""`verify`: finds or starts both sides, asks every case, prints the outcome."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import typer
from rich.console import Console

from orchestrator.commands.common import INTERRUPTED, folder_of
from orchestrator.commands.sides import Found, both_sides, temporary_order
from orchestrator.config import API_KEYS_VARIABLE, Loaded
from orchestrator.deployment.logging import json_log
from orchestrator.deployment.progress import Progress, for_terminal
from orchestrator.deployment.reach import Reach, client_key
from orchestrator.deployment.start import Order, deployed
from orchestrator.deployment.state import State
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.verify.cases import built_in
from orchestrator.verify.compare import TOLERANCE
from orchestrator.verify.counters import import_counts, problems_in
from orchestrator.verify.ground import Check, common_ground
from orchestrator.verify.report import Report, Table
from orchestrator.verify.run import Sides, Verdict, all_at_once, imports_seen, one_by_one

ASKING = httpx.Timeout(300.0, connect=5.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the flags of `verify` say."""

    url: str | None
    against: str | None
    """URL of a stock TGI; None compares with a mixed shard."""
    against_key_file: Path | None
    """Holds the API key that it asks for."""
    tolerance: float | None
    concurrency: int


def run_verify(loaded: Loaded, wanted: Wanted, *, as_json: bool) -> None:
    """Exit code 1 on any difference and on any silent local prefill.

    Without a running deployment of that name one is started, and stopped at the end.
    """
    table, progress = Table(Console(stderr=as_json)), for_terminal()
    state = folder_of(loaded.settings.deployment).running()
    if state is not None and wanted.url is None:
        _check_same(loaded, state)
    try:
        with ExitStack() as stack:
            stack.enter_context(json_log(Path(os.devnull)))
            order = None
            if wanted.url is None and state is None:
                order = stack.enter_context(temporary_order(loaded, progress))
            key = client_key(loaded.settings.gateway.keys_file, os.environ)
            report = asyncio.run(_verified(order, state, wanted, key, progress, table))
    except BaseExceptionGroup as group:
        # Of many requests at once the first of our own errors is the one to tell.
        ours = group.subgroup(OrchestratorError)
        if ours is None:
            raise
        raise _first(ours) from group
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.close()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    if not report.ok:
        raise typer.Exit(1)


def _check_same(loaded: Loaded, state: State) -> None:
    """Flags that ask for something else than what runs must not be passed over in silence."""
    model = loaded.settings.model
    if loaded.origins["model.dtype"] == "flag" and model.dtype not in ("auto", state.dtype):
        raise ConfigError(
            f"The deployment {state.deployment!r} runs in {state.dtype}: stop it first, or drop --dtype."
        )
    if loaded.origins["model.id"] == "flag" and Path(model.id).name != Path(state.model_name).name:
        raise ConfigError(
            f"The deployment {state.deployment!r} runs {state.model_name}: stop it first, or drop --model."
        )


def _first(group: BaseExceptionGroup[OrchestratorError]) -> OrchestratorError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _verified(
    order: Order | None,
    state: State | None,
    wanted: Wanted,
    api_key: str,
    progress: Progress,
    table: Table,
) -> Report:
    _cancel_on_sigterm()
    async with AsyncExitStack() as stack:
        if order is not None:
            state = (await stack.enter_async_context(deployed(order, progress))).state
        if wanted.url is not None and (state is None or state.url != wanted.url):
            state = None
        url = wanted.url or (state.url if state else "")
        both = both_sides(url=url, state=state, reference=wanted.against, progress=progress)
        found = await stack.enter_async_context(both)
        tolerance = wanted.tolerance if wanted.tolerance is not None else TOLERANCE[found.dtype]
        if wanted.concurrency > 1 and found.dtype != "float32":
            raise ConfigError(
                f"--concurrency compares answers from mixed batches, which {found.dtype} does not promise: "
                "use --dtype float32."
            )
        reach = Reach.of(state) if state else Reach.at(url, os.environ)
        left = await stack.enter_async_context(reach.client(ASKING, api_key))
        await _check_key(left)
        right = await stack.enter_async_context(_reference(found.reference_url, wanted.against_key_file))
        admin = await stack.enter_async_context(reach.admin(ASKING))
        progress.close()
        # A deployment that only serves mixed may take over from a stock TGI; a pair must have split.
        sides = Sides(left, right, tolerance, splits=found.splits or wanted.against is None)
        ground = await _common(found, sides, table) if wanted.against is not None else []
        if any(check.ends for check in ground):
            return _ended(found, sides, ground, table)
        return await _asked(found, sides, admin, wanted.concurrency, table, ground)


def _cancel_on_sigterm() -> None:
    """What was started for this run must be stopped in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _check_key(gateway: httpx.AsyncClient) -> None:
    """ConfigError before the first case where the gateway asks for a key and ours is none."""
    try:
        answer = await gateway.post("/tokenize", json={"inputs": "x"})
    except httpx.TransportError:
        return  # the first case says how it does not answer
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(
            f"{gateway.base_url} asks for an API key: name one in {API_KEYS_VARIABLE} (verify=KEY), "
            "or the deployment's gateway.keys_file."
        )


def _reference(url: str, key_file: Path | None) -> httpx.AsyncClient:
    headers = {}
    if key_file is not None:
        try:
            headers["authorization"] = f"Bearer {key_file.read_text(encoding='utf-8').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The key file {key_file} cannot be read: {error}.") from None
    return httpx.AsyncClient(base_url=url, timeout=ASKING, trust_env=False, headers=headers)


async def _common(found: Found, sides: Sides, table: Table) -> list[Check]:
    table.heading(f"{found.separated_url} beside {found.reference}", columns=False)
    return await common_ground(sides.separated, sides.reference, table.ground)


def _ended(found: Found, sides: Sides, ground: Sequence[Check], table: Table) -> Report:
    """Of what was compared before it became clear that answers cannot be."""
    report = Report(
        separated_url=found.separated_url,
        reference=found.reference,
        model=found.model,
        dtype=found.dtype,
        tolerance=sides.tolerance,
        one_by_one=(),
        ground=ground,
        splits=sides.splits,
    )
    table.summary(report)
    return report


async def _asked(
    found: Found,
    sides: Sides,
    admin: httpx.AsyncClient,
    at_once: int,
    table: Table,
    ground: Sequence[Check],
) -> Report:
    before = await import_counts(admin)
    table.heading(f"{found.separated_url} against {found.reference}, one request at a time")
    verdicts, asked = await one_by_one(built_in(), sides, table.row)
    together: list[Verdict] = []
    if at_once > 1:
        table.heading(f"{at_once} greedy requests at once, against their answers one by one")
        together = await all_at_once(asked, at_once, sides, table.row)
    _, hits = imports_seen([*verdicts, *together])
    after = await import_counts(admin)
    counted = None if before is None or after is None else after - before
    report = Report(
        separated_url=found.separated_url,
        reference=found.reference,
        model=found.model,
        dtype=found.dtype,
        tolerance=sides.tolerance,
        one_by_one=verdicts,
        at_once=at_once,
        all_at_once=together,
        shard_imports=counted,
        problems=problems_in(counted, hits),
        ground=ground,
        splits=sides.splits,
    )
    table.summary(report)
    return report
