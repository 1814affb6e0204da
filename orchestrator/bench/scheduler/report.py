"""The report for people: a table of figures and one of targets for each part."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.bench.scheduler.parts import Part, Row, Verdict

_COLUMNS_MOST = 9
"""A part with more figures is shown on its side: one line a figure."""
_BESIDE_MOST = 4
"""Rows of such a part side by side; more go below."""


def show(part: Part, console: Console) -> None:
    console.print(f"{part.name}: {part.title}", style="bold", highlight=False)
    if part.rows:
        if len(part.rows[0]) <= _COLUMNS_MOST:
            console.print(_table(part.rows))
        else:
            for start in range(0, len(part.rows), _BESIDE_MOST):
                console.print(_on_its_side(part.rows[start : start + _BESIDE_MOST]))
    for note in part.notes:
        console.print(note, style="dim", highlight=False)
    if part.verdicts:
        console.print(_targets(part.verdicts))


def _table(rows: Sequence[Row]) -> Table:
    table = _empty()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    return table


def _on_its_side(rows: Sequence[Row]) -> Table:
    """One column a row; the words that name a row stand on top of it."""
    table = _empty()
    table.show_header = False
    table.add_column("", no_wrap=True)
    for _ in rows:
        table.add_column("", justify="right", overflow="fold")
    for name in rows[0]:
        table.add_row(name, *(cell(row[name]) for row in rows))
    return table


def _targets(verdicts: Sequence[Verdict]) -> Table:
    table = _empty()
    table.add_column("target")
    for column in ("measured", "wanted", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    for verdict in verdicts:
        wanted = f"{'at least' if verdict.at_least else 'at most'} {verdict.limit:g}"
        table.add_row(verdict.what, precise(verdict.value), wanted, met(verdict))
    return table


def met(verdict: Verdict) -> str:
    """`yes`, `NO`, or `-` where it was not measured."""
    return {None: "-", True: "yes", False: "NO"}[verdict.met]


def precise(value: float | None) -> str:
    """One more digit: a target is met or missed by it."""
    return f"{value:.4g}" if value is not None and abs(value) < 100 else cell(value)


def cell(value: str | float | None) -> str:
    """Numbers with three digits that matter."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:.3g}"


def _empty() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
