"""In place of `text-generation-launcher`: writes down how it was started, then behaves as STAND_IN says.

run           until SIGTERM, SIGINT or SIGHUP, then exit code 0
slow          the same, half a second after the signal
exit N        at once
signal N      ends by that signal
orphans       leaves a server in a process group of its own, and one that has ended, and is killed
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

SERVER = "import time; time.sleep(600)"


def main() -> int:
    behaviour, *number = os.environ["STAND_IN"].split()
    received: list[int] = []
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda seen, _: received.append(seen))
    facts = {
        "argv": sys.argv[1:],
        "env": dict(os.environ),
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "server": shutil.which("text-generation-server"),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "orphans": orphans() if behaviour == "orphans" else [],
    }
    write("started.json", facts)
    if behaviour == "exit":
        return int(number[0])
    if behaviour in ("signal", "orphans"):
        how = int(number[0]) if number else signal.SIGKILL
        if how != signal.SIGKILL:
            signal.signal(how, signal.SIG_DFL)
        os.kill(os.getpid(), how)
    while not received:
        time.sleep(0.01)
    if behaviour == "slow":
        time.sleep(0.5)
    write("stopped.json", {"received": received, "sidecar": sidecar_lives()})
    return 0


def sidecar_lives() -> bool:
    try:
        os.kill(json.loads(Path(os.environ["BEAT"]).read_text())["pid"], 0)
    except (OSError, ValueError):
        return False
    return True


def orphans() -> list[int]:
    """Pids of a server and of a process that has ended; neither has a living parent."""
    read_fd, write_fd = os.pipe()
    if (helper := os.fork()) == 0:
        server = os.fork()
        if server == 0:
            os.setpgid(0, 0)
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", SERVER])
        ended = os.fork()
        if ended == 0:
            time.sleep(0.1)
            os._exit(0)
        os.write(write_fd, f"{server} {ended}".encode())
        os._exit(0)
    os.waitpid(helper, 0)
    return [int(pid) for pid in os.read(read_fd, 64).split()]


def write(name: str, facts: object) -> None:
    path = Path(os.environ["RECORD"], name)
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    sys.exit(main())
