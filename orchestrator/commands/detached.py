"""`up --detach`: the same `up` in a session of its own, watched until it is ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TextIO

from orchestrator.config import Loaded
from orchestrator.deployment.environment import child_env
from orchestrator.deployment.progress import Progress
from orchestrator.deployment.state import State, StateFolder
from orchestrator.errors import OrchestratorError, Unreachable

UP = (sys.executable, "-m", "orchestrator.cli", "up", "--report-fd")
LOG = "up"
"""Name of the log that catches what the background process itself prints."""
STOP_LIMIT_S = 60.0


class NotStarted(OrchestratorError):
    """What the background process said before it ended; carries its exit code."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def start_in_background(loaded: Loaded, progress: Progress) -> State:
    """The state of the deployment once it is ready; raises what kept it from that.

    Interrupted meanwhile, it stops what was begun.
    """
    folder = StateFolder.of(loaded.settings.deployment, os.environ)
    folder.create()
    reader, writer = os.pipe()
    with os.fdopen(reader) as reports, folder.log_of(LOG).open("a") as log:
        process = subprocess.Popen(
            [*UP, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_env(loaded, os.environ, {}),
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            _follow(reports, progress)
        except BaseException:
            _end(process)
            raise
    state = folder.running()
    if state is None:
        raise Unreachable("The deployment ended right after it was ready: see `tgi-orchestrator logs up`.")
    return state


def _follow(reports: TextIO, progress: Progress) -> None:
    """Show what is reported, up to `ready`."""
    for line in reports:
        report = json.loads(line)
        if "step" in report:
            progress.step(report["step"])
        elif "done" in report:
            progress.done(report["done"])
        elif "error" in report:
            raise NotStarted(report["error"], report["code"])
        elif "ready" in report:
            return
    raise NotStarted("The deployment did not start: see `tgi-orchestrator logs up`.", 1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it stop in order; it may have ended already."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
