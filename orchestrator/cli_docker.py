"""The options of commands for a host with containers; their work is in `commands`."""

from __future__ import annotations

import typer

docker_commands = typer.Typer(rich_markup_mode=None)
"""Joined to the whole command line without a name of its own."""
