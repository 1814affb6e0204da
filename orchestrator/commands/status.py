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
    if mode := told.get("mode"):
        console.print(mode_line(mode))
    if told.get("degraded"):
        console.print(f"[yellow]{told['degraded']}[/]")
    console.print(shard_table(told))
    for shard in told["shards"]:
        if shard["note"]:
            console.print(f"[yellow]{shard['shard']} serves mixed only: {escape(shard['note'])}[/]")
    if any(shard.get("costs") for shard in told["shards"]):
        console.print()
        console.print(cost_table(told))
        console.print()
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
        table.add_column(name, no_wrap=True)
    for name in ("KV tokens", "slots", "records", "ring MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("epoch", overflow="ellipsis", max_width=19)
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


def mode_line(mode: Mapping[str, Any]) -> str:
    """Who has set which level, what it means and why."""
    from rich.markup import escape

    colour = "green" if mode["level"] == 0 else "yellow"
    cap = "" if mode["output_cap"] is None else f", answers of at most {mode['output_cap']} tokens"
    shed = "" if mode["shed_below"] is None else ", low priorities refused"
    by = "" if mode["set_by"] == "conductor" else ", held by an operator"
    why = f": {escape(mode['reason'])}" if mode["reason"] else ""
    return f"mode [{colour}]{mode['name']}[/]{cap}{shed}{by}{why}"


def cost_table(told: Mapping[str, Any]) -> Table:
    """A row for each shard that was measured: what its phases take; an empty cell is not known."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("measured")
    for name in ("L_m", "prefill tok/s", "step of 1", "of a full batch", "relay", "pull", "prefill batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for shard in told["shards"]:
        costs = shard.get("costs")
        if not costs:
            continue
        figures = costs["figures"]
        full = figures.get("full_batch")
        table.add_row(
            shard["shard"],
            f"{figures['saturation_tokens']:,}" if "saturation_tokens" in figures else "",
            _number(figures.get("prefill_tokens_per_s"), ""),
            _number(figures.get("decode_step_one_ms"), " ms"),
            f"{_number(figures['decode_step_full_ms'], ' ms')} ({full})" if full else "",
            _way(costs.get("relay")),
            _way(costs.get("pull")),
            _batch(shard),
        )
    return table


def _batch(shard: Mapping[str, Any]) -> str:
    """Measured: prompts of a batch, and their tokens."""
    requests, tokens = shard.get("batch_requests"), shard.get("batch_tokens")
    return f"{requests:.1f} x {tokens / requests:.0f} tokens" if requests and tokens else ""


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def _way(cost: Mapping[str, float] | None) -> str:
    """Latency and bandwidth of records."""
    if not cost:
        return ""
    return f"{1000 * cost['latency_s']:.1f} ms, {cost['bytes_per_s'] / 2**30:,.2f} GiB/s"


def _totals(told: Mapping[str, Any]) -> str:
    reserved, outstanding = told["reserved"], told["outstanding"]
    return (
        f"{told['open_requests']} open requests, {told['waiting']} waiting; reserved: "
        f"{reserved['kv_tokens']:,} KV tokens in {reserved['slots']} slots; "
        f"{outstanding['records']} outstanding records."
    )
