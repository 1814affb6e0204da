"""`tgi-orchestrator` as a user types it, with shards in containers of the tests' engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

COMMAND_LIMIT_S = 120


@dataclass
class DockerLine:
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

    @staticmethod
    def line(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator.cli", *arguments]

    def run(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*arguments), capture_output=True, text=True, env=self.env, timeout=limit_s
        )

    def json(self, *arguments: str) -> Any:
        """What a command that must succeed prints."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """In a session of its own, so that a signal reaches it alone."""
        return subprocess.Popen(
            self.line(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
            start_new_session=True,
        )

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
