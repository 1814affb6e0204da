"""The options of commands for a host with containers; their work is in `commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli_options import Config, Deployment, Json

docker_commands = typer.Typer(rich_markup_mode=None)
"""Joined to the whole command line without a name of its own."""


# --- moving in ---------------------------------------------------------------------------------


@docker_commands.command("init")
def init_settings(
    from_container: Annotated[
        str | None, typer.Option(metavar="NAME", help="A container of stock TGI, running or stopped.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "orchestrator.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    print_only: Annotated[bool, typer.Option("--print", help="Print it, write no file.")] = False,
) -> None:
    """Write a settings file for this machine, or one that takes over from a stock TGI."""
    from orchestrator.commands.init import Wish, run_init

    run_init(Wish(from_container, output, force, print_only))


# --- what this machine carries -------------------------------------------------------------------


@docker_commands.command("doctor")
def doctor(
    config: Config = None,
    deployment: Deployment = None,
    host: Annotated[str | None, typer.Option(help="The engine, as DOCKER_HOST has it.")] = None,
    image: Annotated[str | None, typer.Option(help="Look at this image in place of the settings'.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller records.")] = False,
    as_json: Json = False,
) -> None:
    """Check engine, GPUs, memory, ports and images, and prove each transport between two containers."""
    from orchestrator.commands.doctor import Flags, run_doctor

    run_doctor(Flags(config, deployment, host, image, quick), as_json=as_json)


# --- other shards ------------------------------------------------------------------------------


RedisOfIt = Annotated[
    str | None, typer.Option("--redis", help="Redis URL; the default is the running deployment's.")
]


@docker_commands.command("apply")
def apply(
    config: Config = None,
    deployment: Deployment = None,
    redis: RedisOfIt = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell the difference, change nothing.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to follow the roll.")] = 3600.0,
    as_json: Json = False,
) -> None:
    """Roll the running shards to what the settings say now, one at a time."""
    from orchestrator.commands.apply import Wish, apply_settings
    from orchestrator.commands.common import settings_of
    from orchestrator.deployment.progress import for_terminal
    from orchestrator.deployment.start import planned_orders

    loaded = settings_of(config, {"deployment": deployment, "redis.url": redis})
    apply_settings(loaded, Wish(dry_run, timeout), planned_orders, for_terminal(), as_json=as_json)


@docker_commands.command("drain")
def drain(
    shard: Annotated[str, typer.Argument(help="A shard such as decode-0.")],
    config: Config = None,
    deployment: Deployment = None,
    redis: RedisOfIt = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it back: it serves again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its requests are done.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for that.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Send nothing new to a shard, and let its requests end; it goes on running."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.drain import Wish, drain_shard

    loaded = settings_of(config, {"deployment": deployment, "redis.url": redis})
    drain_shard(loaded, Wish(shard, undo, wait, timeout), as_json=as_json)
