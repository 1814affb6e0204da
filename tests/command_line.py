"""`tgi-orchestrator` as a user types it, with an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMAND_LIMIT_S = 120


class Line:
    """Whoever derives from it says what the environment is."""

    env: dict[str, str]

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
