"""`config show`: every setting, its value, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from orchestrator.commands.common import settings_of


def show_config(config: Path | None, *, origin: bool, as_json: bool) -> None:
    rows = list(settings_of(config, {}).rows())
    if as_json:
        listed = {key: {"value": _plain(value), "origin": source} for key, value, source in rows}
        typer.echo(json.dumps(listed, indent=2))
        return
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(json.dumps(_plain(value))) for _, value, _ in rows)
    for key, value, source in rows:
        line = f"{key:<{key_width}}  {json.dumps(_plain(value)):<{value_width}}"
        typer.echo(f"{line}  {source}" if origin else line.rstrip())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
