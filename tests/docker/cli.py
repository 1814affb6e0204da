"""`tgi-orchestrator` as a user types it, with shards in containers of the tests' engine."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.command_line import Line


@dataclass
class DockerLine(Line):
    """A state folder and a deployment of this test alone; containers carry the deployment's label."""

    model: Path
    state_home: Path
    name: str
    host: str
    image: str
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        self.env = kept | {
            "XDG_STATE_HOME": str(self.state_home),
            "TMPDIR": str(self.state_home),
            "ORCHESTRATOR_DEPLOYMENT": self.name,
            "ORCHESTRATOR_LAUNCHER": "docker",
            "ORCHESTRATOR_DOCKER__HOST": self.host,
            "ORCHESTRATOR_DOCKER__IMAGE": self.image,
            "ORCHESTRATOR_GATEWAY__LISTEN": "127.0.0.1:0",
            "ORCHESTRATOR_MODEL__ID": str(self.model),
            "ORCHESTRATOR_MODEL__DTYPE": "float32",
            # The small model is served mixed wherever the cost model may choose.
            "ORCHESTRATOR_ROUTING__CHOICE": "separated",
        }

    @property
    def state_file(self) -> Path:
        """Of the deployment, while it runs."""
        return self.state_home / "tgi-orchestrator" / self.name / "state.json"

    def end(self) -> None:
        """Whatever the test started on this machine is killed: containers stay."""
        mine = [one for one in psutil.process_iter(["environ"]) if self._started(one)]
        for process in mine:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(mine, timeout=10)

    def _started(self, process: psutil.Process) -> bool:
        env = process.info["environ"] or {}
        # By the state folder as well: a container's processes are on this machine too, and not ours to kill.
        return (env.get("ORCHESTRATOR_DEPLOYMENT"), env.get("XDG_STATE_HOME")) == (
            self.name,
            str(self.state_home),
        )
