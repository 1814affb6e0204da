"""`status`: what a gateway says of its deployment."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from orchestrator.deployment.reach import Reach
from orchestrator.verify.asking import get_json

if TYPE_CHECKING:
    from rich.table import Table

TIMEOUT_S = 5.0
PIPED_COLUMNS = 160
"""Where there is no terminal to ask, nothing shall be cut off."""


def show_status(url: str, *, as_json: bool) -> None:
    """Print it; Unreachable when the gateway does not answer."""
    told = asyncio.run(_asked(url))
    if as_json:
        typer.echo(json.dumps({"url": url, **told}, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    console.print(f"[bold]{told['model']}[/] at {url}")
    if told.get("degraded"):
        console.print(f"[yellow]{told['degraded']}[/]")
    console.print(shard_table(told))
    for shard in told["shards"]:
        if shard["note"]:
            console.print(f"[yellow]{shard['shard']} serves mixed only: {escape(shard['note'])}[/]")
    console.print(_totals(told))


async def _asked(url: str) -> dict[str, Any]:
    async with Reach.at(url, os.environ).admin(TIMEOUT_S) as client:
        told: dict[str, Any] = await get_json(client, "/admin/status")
    return told


def shard_table(told: Mapping[str, Any]) -> Table:
    """A row for each shard: what it is, and what is promised on it."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("shard", "role", "engine", "state"):
        table.add_column(name)
    for name in ("KV tokens", "slots", "records", "ring MiB"):
        table.add_column(name, justify="right")
    table.add_column("epoch")
    for shard in told["shards"]:
        colour = "green" if shard["state"] == "ready" else "yellow"
        table.add_row(
            shard["shard"],
            shard["role"],
            shard["engine"] if shard["hooked"] else f"[yellow]{shard['engine']}, unhooked[/]",
            f"[{colour}]{shard['state']}[/]",
            f"{shard['reserved_kv_tokens']:,} / {shard['kv_tokens']:,}",
            f"{shard['reserved_slots']} / {shard['slots']}",
            str(shard["outstanding_records"]),
            f"{shard['outstanding_bytes'] / 2**20:,.0f} / {shard['ring_bytes'] / 2**20:,.0f}",
            str(shard["epoch"]),
        )
    return table


def _totals(told: Mapping[str, Any]) -> str:
    reserved, outstanding = told["reserved"], told["outstanding"]
    return (
        f"{told['open_requests']} open requests, {told['waiting']} waiting; reserved: "
        f"{reserved['kv_tokens']:,} KV tokens in {reserved['slots']} slots; "
        f"{outstanding['records']} outstanding records."
    )
