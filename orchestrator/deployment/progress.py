"""What `up` shows while it starts: a spinner on a terminal, plain lines elsewhere, JSON lines to a parent."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import typer

if TYPE_CHECKING:
    from rich.status import Status


class Progress(Protocol):
    """Where the steps of a start are told.  Every text is for a user."""

    def step(self, text: str) -> None:
        """What is being done now."""

    def done(self, text: str) -> None:
        """What is finished, in a line that stays."""

    def close(self) -> None: ...


class Lines:
    """A line for each step and for each that is finished, on stderr: for pipes, log files and CI."""

    def __init__(self) -> None:
        self._last = ""

    def step(self, text: str) -> None:
        if text != self._last:
            typer.echo(f"... {text}", err=True)
            self._last = text

    def done(self, text: str) -> None:
        typer.echo(f"    {text}", err=True)

    def close(self) -> None: ...


class Spinner:
    """A spinner with the present step; finished steps stay above it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._status: Status | None = None

    def step(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def done(self, text: str) -> None:
        self._console.print(f"[green]✓[/] {text}", highlight=False)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


class Reports:
    """JSON lines for the process that started a detached deployment; silent once that one is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def step(self, text: str) -> None:
        self.report(step=text)

    def done(self, text: str) -> None:
        self.report(done=text)

    def report(self, **fields: Any) -> None:
        if self._stream.closed:
            return
        try:
            self._stream.write(json.dumps(fields) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self.close()

    def close(self) -> None:
        try:
            self._stream.close()
        except BrokenPipeError:
            pass


def for_terminal() -> Progress:
    """What fits stderr: stdout stays free for answers."""
    return Spinner() if sys.stderr.isatty() else Lines()
