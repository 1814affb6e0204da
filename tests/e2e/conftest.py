"""Real deployments of the tiny model, started through the command line like a user does."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.command_line import Line


@dataclass
class CommandLine(Line):
    """`tgi-orchestrator` with a state folder and an arena folder of this test alone."""

    model: Path
    state_home: Path
    arena: Path
    name: str
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        self.env = kept | {
            "XDG_STATE_HOME": str(self.state_home),
            "ORCHESTRATOR_ARENA__DIR": str(self.arena),
            "ORCHESTRATOR_DEPLOYMENT": self.name,
            "ORCHESTRATOR_GATEWAY__LISTEN": "127.0.0.1:0",
            "ORCHESTRATOR_MODEL__ID": str(self.model),
            "ORCHESTRATOR_MODEL__DTYPE": "float32",
            # The small model is served mixed wherever the cost model may choose.
            "ORCHESTRATOR_ROUTING__CHOICE": "separated",
            "TMPDIR": str(self.state_home),
        }

    def left_over(self) -> list[str]:
        """Files of ours that must be gone after a stop: state, sockets, arenas, folders for them."""
        state = self.state_home / "tgi-orchestrator" / self.name / "state.json"
        made = list(self.state_home.glob("tgi-orchestrator-*"))
        return [str(path) for path in (state, self.arena, *made) if path.exists()]


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive_after(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that have not ended by themselves within the limit."""
    return psutil.wait_procs(processes, timeout=limit_s)[1]


@pytest.fixture
def cli(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Whatever the test starts is ended after it, also when it fails."""
    unique = uuid.uuid4().hex[:8]
    arena = Path("/dev/shm") / f"tgio-test-{unique}"
    # A short path: the Redis socket stands below it.
    state_home = Path(tmp_path_factory.mktemp("s", numbered=True))
    line = CommandLine(tiny_model, state_home, arena, f"e2e-{unique}")
    yield line
    mine = [one for one in psutil.process_iter(["environ"]) if _belongs(one, line.name)]
    for process in mine:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(mine, timeout=10)
    shutil.rmtree(arena, ignore_errors=True)


def _belongs(process: psutil.Process, name: str) -> bool:
    return (process.info["environ"] or {}).get("ORCHESTRATOR_DEPLOYMENT") == name
