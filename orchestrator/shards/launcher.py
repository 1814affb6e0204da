"""How shards are started and stopped: the seam, and its fake in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import ShardError
from tgi_patches.contract import ShardSpec

BAD_INPUT = 2
"""Exit code of a shard that cannot use what it was given; starting it again would not help."""


@dataclass(frozen=True, slots=True)
class Running:
    """A shard that was launched and has not exited."""

    shard: str
    url: str
    pid: int | None = None
    """On this machine; None elsewhere."""
    sidecar_url: str = ""
    """Where its sidecar answers; empty where that is `url`."""
    pull_host: str = ""
    """Address at which other hosts pull its records; empty for what it says itself, or the host of `url`."""
    order: ShardSpec | None = None
    """With which it was launched, where the launcher can tell: it may be another than the one wanted now."""
    observed: bool = False
    """Somebody else started it and keeps it: it is never stopped and never launched again from here."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a shard ended: exit code, or minus the signal."""

    shard: str
    code: int
    last_line: str = ""
    """The last line of its log, without a line break."""

    @property
    def bad_input(self) -> bool:
        return self.code == BAD_INPUT

    def __str__(self) -> str:
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


class Launcher(Protocol):
    """Starts shards.  They outlive a conductor that stops leading; `running` finds them again."""

    async def launch(self, spec: ShardSpec) -> Running:
        """Start it; it answers at the URL once it is ready.

        Raises ConfigError when it can never start, ShardError when it did not start this time.
        """

    async def running(self) -> Mapping[str, Running]:
        """What runs, by shard name."""

    async def wait(self, shard: str) -> Exit:
        """Returns as soon as the shard has exited; at once if it did not run.  May be cancelled."""

    async def stop(self, shard: str, grace_s: float) -> None:
        """End it: asked first, forced after `grace_s`.  Returns when it is gone, also if it never ran."""

    async def logs(self, shard: str, lines: int) -> list[str]:
        """Its last lines, oldest first; empty for an unknown shard."""

    async def close(self, grace_s: float) -> None:
        """Stop everything at the same time."""


class FakeLauncher:
    """Shards that are only names; `crash` ends one, `launches` counts starts."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        self.stopped: list[str] = []
        self.log_lines: dict[str, list[str]] = {}
        self._running: dict[str, Running] = {}
        self._exits: dict[str, asyncio.Future[Exit]] = {}

    async def launch(self, spec: ShardSpec) -> Running:
        if spec.shard in self._running:
            raise ShardError(f"Shard {spec.shard} is already running.")
        count = self.launches[spec.shard] = self.launches.get(spec.shard, 0) + 1
        self._running[spec.shard] = Running(spec.shard, f"http://{spec.shard}/{count}", order=spec)
        self._exits[spec.shard] = asyncio.get_running_loop().create_future()
        return self._running[spec.shard]

    def crash(self, shard: str, code: int = 1, last_line: str = "") -> None:
        """End a running shard."""
        del self._running[shard]
        self._exits[shard].set_result(Exit(shard, code, last_line))

    async def running(self) -> Mapping[str, Running]:
        return dict(self._running)

    async def wait(self, shard: str) -> Exit:
        if shard not in self._exits:
            return Exit(shard, 0)
        return await asyncio.shield(self._exits[shard])

    async def stop(self, shard: str, grace_s: float) -> None:  # noqa: ARG002 - the Protocol's name
        if shard in self._running:
            self.stopped.append(shard)
            self.crash(shard, code=-15)

    async def logs(self, shard: str, lines: int) -> list[str]:
        return self.log_lines.get(shard, [])[-lines:]

    async def close(self, grace_s: float) -> None:
        for shard in list(self._running):
            await self.stop(shard, grace_s)
