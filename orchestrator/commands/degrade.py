"""`degrade`: what mode holds and why; sets one for good, or gives it back to the conductor.

It speaks to the deployment's Redis, so that it needs neither a gateway nor a conductor.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.access.keys import PRIORITIES
from orchestrator.commands.common import folder_of, running_state
from orchestrator.config import Loaded, hidden
from orchestrator.core import degraded
from orchestrator.core.decision import Mode
from orchestrator.core.degraded import HIGHEST, LEVELS, Load
from orchestrator.errors import ConfigError
from orchestrator.queues.mode import ModeKey

REASON_CHARACTERS = 200
PIPED_COLUMNS = 160
"""Where there is no terminal to ask, nothing shall be cut off."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags say; nothing at all only looks."""

    to: str | None = None
    auto: bool = False
    reason: str = ""
    dry_run: bool = False

    @property
    def looks(self) -> bool:
        return self.to is None and not self.auto and not self.dry_run


@dataclass(frozen=True, slots=True)
class Told:
    """What held before, what holds now, and what the conductor would choose."""

    deployment: str
    before: Mode
    mode: Mode
    by_itself: Mode
    why: str
    """What `by_itself` follows from."""
    leader: str
    """The conductor that leads; empty while none does."""
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": self.deployment,
            "changed": self.changed,
            "before": degraded.facts(self.before),
            "mode": degraded.facts(self.mode),
            "by_itself": degraded.facts(self.by_itself),
            "load": self.why,
            "conductor": self.leader or None,
        }


def degrade_deployment(loaded: Loaded, wish: Wish, *, as_json: bool) -> None:
    """ConfigError for flags that cannot be meant, Unreachable without Redis or deployment."""
    wanted = wanted_mode(wish)
    told = asyncio.run(_done(loaded, wish, wanted))
    if as_json:
        typer.echo(json.dumps(told.to_dict(), indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    console.print(_headline(told, wish))
    console.print(_lines(told))


def wanted_mode(wish: Wish) -> Mode | None:
    """The mode that an operator sets; None where none does."""
    if wish.to is None:
        if wish.reason:
            raise ConfigError("--reason belongs to --to.")
        return None
    if wish.auto:
        raise ConfigError("--to sets a level and --auto gives it back: name one of them.")
    if len(wish.reason) > REASON_CHARACTERS or not (wish.reason or "x").isprintable():
        raise ConfigError(f"--reason must be one line of at most {REASON_CHARACTERS} characters.")
    return degraded.mode_of(_level(wish.to), auto=False, reason=wish.reason or "An operator set it.")


def redis_url_of(loaded: Loaded) -> str:
    """Of the deployment that runs here, else the settings' own.

    Its state file hides a password: then the settings must name the same URL with it.
    """
    given, deployment = loaded.settings.redis.url, loaded.settings.deployment
    if given is not None and loaded.origins["redis.url"] == "flag":
        return given
    if given is not None and folder_of(deployment).running() is None:
        return given
    known = running_state(deployment).redis_url
    if given is not None and hidden("redis.url", given) == known:
        return given
    if urlsplit(known).password == "***":
        raise ConfigError(
            f"The Redis of deployment {deployment!r} has a password, which is not written down: "
            "name its URL with --redis, or the settings file with --config."
        )
    return known


def _level(text: str) -> int:
    names = [level.name for level in LEVELS]
    if text in names:
        return names.index(text)
    if text.isascii() and text.isdigit() and int(text) <= HIGHEST:
        return int(text)
    known = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    raise ConfigError(f"There is no level {text!r}: there are {known}.")


def refused(mode: Mode) -> list[str]:
    """Priorities that the mode refuses, by name."""
    below = mode.shed_below
    return [] if below is None else [name for name, number in PRIORITIES.items() if number < below]


async def _done(loaded: Loaded, wish: Wish, wanted: Mode | None) -> Told:
    settings = loaded.settings
    async with ModeKey(redis_url_of(loaded), settings.deployment) as key:
        table = await key.table()
        load = Load.of(table.shards, table.waiting, settings.limits.queue_size)
        by_itself, why = degraded.fitting(load), degraded.told(load)
        mode = table.mode if wish.looks else wanted or by_itself
        changed = not wish.dry_run and mode != table.mode
        if changed:
            await key.set(mode)
    return Told(settings.deployment, table.mode, mode, by_itself, why, table.leader, changed)


# --- for people ---------------------------------------------------------------------------------


def _headline(told: Told, wish: Wish) -> str:
    name, before, now = f"[bold]{told.deployment}[/]", _named(told.before), _named(told.mode)
    if wish.looks:
        return f"{name} is {now}"
    if wish.dry_run:
        return f"{name} is {before} and would be {now}; nothing was changed"
    return f"{name} was {before} and is {now}" if told.changed else f"{name} was {now} already"


def _named(mode: Mode) -> str:
    colour = "green" if mode.level == 0 else "yellow" if mode.level < HIGHEST else "red"
    return f"[{colour}]{degraded.facts(mode)['name']}[/] (level {mode.level})"


def _lines(told: Told) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in _facts(told):
        table.add_row(name, text)
    return table


def _facts(told: Told) -> Iterator[tuple[str, str]]:
    mode = told.mode
    cap = mode.output_cap
    yield "answers", "as long as they are asked for" if cap is None else f"at most {cap} tokens"
    shed = refused(mode)
    yield "refused", f"requests of priority {' and '.join(shed)}" if shed else "nobody"
    yield "set by", "the conductor, by itself" if mode.auto else "an operator; it stays until --auto"
    if mode.reason:
        yield "why", escape(mode.reason)
    if not mode.auto or mode.level != told.by_itself.level:
        yield "by itself", f"it would be {_named(told.by_itself)} now: {told.why}"
    if not told.leader:
        yield "", "[yellow]No conductor leads: nothing changes the mode until one does.[/]"
