"""`apply`: what the settings say now against what runs, and the roll from one to the other.

The leading conductor does the work and goes on if this command ends; here it is asked for and followed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from orchestrator.commands.common import INTERRUPTED, running_state
from orchestrator.commands.degrade import PIPED_COLUMNS, redis_url_of
from orchestrator.config import Loaded
from orchestrator.core.difference import Difference, SettingsChange, difference, restart_settings
from orchestrator.core.roll import Roll, RollState
from orchestrator.deployment.progress import Progress
from orchestrator.errors import ConfigError, OrchestratorError, Unreachable
from orchestrator.queues.wishes import Seen, Wanted, WishKeys
from tgi_patches.contract import ShardSpec

POLL_S = 0.25
TAKEN_UP_S = 15.0
"""Longer than another conductor needs to take over."""

Planner = Callable[[Loaded, Progress], Sequence[ShardSpec]]
"""The orders that follow from settings.  ConfigError in one sentence for what cannot work here."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags say."""

    dry_run: bool = False
    timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Told:
    """All that was found and done."""

    deployment: str
    dry_run: bool
    shards: Difference
    restart: SettingsChange
    roll: Roll | None = None
    """None where nothing was to be done."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": self.deployment,
            "dry_run": self.dry_run,
            "shards": self.shards.to_dict(),
            "restart": self.restart.to_list(),
            "roll": None if self.roll is None else asdict(self.roll),
        }


def apply_settings(
    loaded: Loaded, wish: Wish, planned: Planner, progress: Progress, *, as_json: bool
) -> None:
    """ConfigError for what cannot be rolled: then nothing has changed.

    Unreachable without deployment, Redis or conductor; OrchestratorError for a roll that failed.
    """
    state = running_state(loaded.settings.deployment)
    restart = restart_settings(state.settings, loaded.told())
    if keys := restart.foundations:
        raise ConfigError(
            f"{_listed(keys)} {'differs' if len(keys) == 1 else 'differ'} from what runs, and old and new "
            "shards could not serve side by side: run `down`, then `up`."
        )
    redis_url = redis_url_of(loaded)
    seen = asyncio.run(_look(redis_url, state.deployment))
    orders = (*planned(loaded, progress), *(one for one in seen.orders or () if one.shard in state.urls))
    found = difference(orders, seen.orders or ())
    if not as_json:
        _show(state.deployment, found, restart)
    roll = None
    # One that failed, or goes on to something else, is still what the conductor wants.
    if not wish.dry_run and (found or seen.roll.state in (RollState.FAILED, RollState.ROLLING)):
        roll = _rolled(redis_url, state.deployment, Wanted.of(orders), wish.timeout_s, progress)
    progress.close()
    if as_json:
        typer.echo(json.dumps(Told(state.deployment, wish.dry_run, found, restart, roll).to_dict(), indent=2))
    elif not found:
        typer.echo("Nothing to do: all shards run as the settings say.")
    elif wish.dry_run:
        typer.echo("Nothing was changed (--dry-run).")
    if roll is not None and roll.state is RollState.FAILED:
        raise OrchestratorError(f"The roll stopped, and the other shards go on. {roll.problem}")


def _rolled(redis_url: str, deployment: str, wanted: Wanted, timeout_s: float, progress: Progress) -> Roll:
    try:
        return asyncio.run(_followed(redis_url, deployment, wanted, timeout_s, progress))
    except KeyboardInterrupt:
        progress.close()
        typer.echo("The roll goes on without this command; `apply` again follows it.", err=True)
        raise typer.Exit(INTERRUPTED) from None


async def _look(redis_url: str, deployment: str) -> Seen:
    async with WishKeys(redis_url, deployment) as keys:
        seen = await keys.seen()
    if not seen.table.leader or seen.orders is None:
        raise Unreachable(f"No conductor leads deployment {deployment!r}: nobody would follow.")
    return seen


async def _followed(
    redis_url: str, deployment: str, wanted: Wanted, timeout_s: float, progress: Progress
) -> Roll:
    """Ask for it and tell its steps until it is over."""
    clock = asyncio.get_running_loop().time
    begun_s, told, taken_up = clock(), 0, False
    async with WishKeys(redis_url, deployment) as keys:
        await keys.want(wanted)
        while clock() < begun_s + timeout_s:
            roll = (await keys.seen()).roll
            if roll.id == wanted.id:
                taken_up = True
                told = _tell(roll, told, progress)
                if roll.over:
                    return roll
            elif taken_up:
                raise OrchestratorError("Something else is wanted now: another `apply`, or a new `up`.")
            elif clock() > begun_s + TAKEN_UP_S:
                raise OrchestratorError(f"No conductor has taken it up within {TAKEN_UP_S:g} s.")
            await asyncio.sleep(POLL_S)
    raise OrchestratorError(f"The roll still goes on after {timeout_s:g} s; `apply` again follows it.")


def _tell(roll: Roll, told: int, progress: Progress) -> int:
    """What has happened since; how much that is in all."""
    for sentence in roll.done[told:]:
        progress.done(sentence.rstrip("."))
    if roll.doing:
        progress.step(roll.doing)
    return len(roll.done)


# --- for people ---------------------------------------------------------------------------------


def _show(deployment: str, found: Difference, restart: SettingsChange) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    console.print(f"[bold]{deployment}[/]: {_counts(found)}")
    for line in lines(found):
        console.print(line)
    for change in restart.changes:
        old, new = escape(_text(change.old)), escape(_text(change.new))
        console.print(f"[yellow]{change.name}[/]: {old} -> {new} only with a restart of `up`")


def lines(found: Difference) -> Iterator[str]:
    """A line for each shard that comes, goes or changes, and for each of its changes."""
    for order in found.added:
        yield f"[green]+[/] {order.shard}"
    for shard in found.removed:
        yield f"[red]-[/] {shard}"
    for one in found.changed:
        yield f"[yellow]~[/] {one.shard}"
        for change in one.changes:
            yield f"    {change.name}: {escape(_text(change.old))} -> {escape(_text(change.new))}"


def _counts(found: Difference) -> str:
    parts = {"new": found.added, "less": found.removed, "changed": found.changed, "as they are": found.same}
    return ", ".join(f"{len(shards)} {name}" for name, shards in parts.items() if shards)


def _text(value: object) -> str:
    return json.dumps(value, default=str)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
