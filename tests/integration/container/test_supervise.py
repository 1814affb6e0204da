"""The supervision with little patience: a sidecar that hangs, and processes that do not want to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

LIMIT_S = 30.0
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from tgi_patches.entrypoint.supervise import Command, Patience, supervise

launcher, sidecar, beat = json.loads(sys.argv[1])
patience = Patience(
    look_every_s=0.05, start_s=20.0, beat_s=0.5, pause_s=0.05, longest_pause_s=0.1, stop_s=0.3
)
env = dict(os.environ)
print(supervise(Command(launcher, env), Command(sidecar, env), Path(beat), patience), flush=True)
"""
SIDECAR = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
path, list_of_pids = sys.argv[1:]
with open(list_of_pids, "a") as file:
    file.write(f"{os.getpid()}\\n")
open(path, "w").close()
time.sleep(600)
"""
"""Beats once, hangs, and will not end."""
LAUNCHER = """
import os, sys, time
path, = sys.argv[1:]
if os.fork() == 0:
    if os.fork() == 0:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setpgid(0, 0)
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
os.wait()
while sum(1 for _ in open(path)) < 4:
    time.sleep(0.01)
sys.exit(5)
"""
"""Leaves a deaf server behind once three sidecars have been seen."""


def test_a_hanging_sidecar_is_replaced_and_who_will_not_end_is_forced(tmp_path: Path) -> None:
    pids, beat = tmp_path / "pids", tmp_path / "p0.sidecar"
    python = [sys.executable, "-I", "-S", "-c"]
    commands = [[*python, LAUNCHER, str(pids)], [*python, SIDECAR, str(beat), str(pids)], str(beat)]
    pids.touch()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", DRIVER, json.dumps(commands)],
            env={"PATH": os.defpath},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        left = living(pids)
    finally:
        for pid in living(pids):
            os.kill(pid, signal.SIGKILL)
    assert done.stdout == f"{5 << 8}\n", done.stderr
    assert done.stderr.count('"event": "sidecar_hangs"') >= 2
    assert len(pids.read_text().split()) >= 4
    assert left == []


def living(pids: Path) -> list[int]:
    return [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
