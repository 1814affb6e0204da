"""`doctor`: whether this machine carries a deployment, and by which ways records travel on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.commands.common import INTERRUPTED, settings_of
from orchestrator.config import Loaded, load_settings
from orchestrator.deployment.doctor.finding import Finding, Report, State
from orchestrator.deployment.doctor.machine import Say
from orchestrator.deployment.doctor.run import Wanted, examined
from orchestrator.deployment.doctor.transports import FULL, QUICK
from orchestrator.deployment.logging import json_log
from orchestrator.errors import ConfigError

COLOURS = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "bold red", State.SKIPPED: "dim"}
PIPED_COLUMNS = 160


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says."""

    config: Path | None = None
    deployment: str | None = None
    host: str | None = None
    image: str | None = None
    quick: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"deployment": self.deployment, "docker.host": self.host}


def run_doctor(flags: Flags, *, as_json: bool) -> None:
    """Exits with the report's code; everything that it started is gone then."""
    wanted = wanted_of(flags)
    with json_log(Path(os.devnull)), _saying(quiet=as_json) as say:
        try:
            report = asyncio.run(_examined(wanted, say))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console(highlight=False))
    raise typer.Exit(report.exit_code)


def wanted_of(flags: Flags) -> Wanted:
    """Settings that cannot be used are a finding, and the rest is looked at with the defaults."""
    fault = ""
    try:
        loaded = settings_of(flags.config, flags.settings)
    except ConfigError as error:
        loaded, fault = _defaults(flags), str(error)
    return Wanted(loaded, fault, flags.image or "", QUICK if flags.quick else FULL)


def _defaults(flags: Flags) -> Loaded:
    """Without file and environment; without a name that cannot be one, too."""
    try:
        return load_settings(None, flags.settings, {})
    except ConfigError:
        return load_settings(None, {}, {})


async def _examined(wanted: Wanted, say: Say) -> Report:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await examined(wanted, say)


@contextlib.contextmanager
def _saying(*, quiet: bool) -> Iterator[Say]:
    """What is being looked at, on a terminal only."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("Looking") as status:
        yield lambda text: status.update(f"Looking at {text}")


# --- for people ---------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold", max_width=24)
    table.add_column("found")
    for finding in report.findings:
        colour = COLOURS[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/]", escape(finding.name), _text(finding))
    console.print(table)
    console.print(_summary(report))


def _text(finding: Finding) -> str:
    told = escape(finding.told)
    if finding.state is State.SKIPPED:
        told = f"[dim]{told}[/]"
    return f"{told}\n[bold]Do:[/] {escape(finding.do)}" if finding.do else told


def _summary(report: Report) -> str:
    parts = [f"[{COLOURS[State(name)]}]{count} {name}[/]" for name, count in report.counts.items() if count]
    return f"[bold]{escape(report.deployment)}[/]: {', '.join(parts)}"
