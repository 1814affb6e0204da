"""Starts Locust on what runs here; `make load` runs it.

`--workload NAME`, `--deployment NAME` and `--page` are its own; everything else goes to Locust.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {
    "mixed": "mixed.py", "chat": "chat.py", "long": "long_prompt.py", "code": "code_completion.py",
}  # fmt: skip
DEFAULTS = {"--users": "8", "--spawn-rate": "1", "--run-time": "60s", "--stop-timeout": "60"}
SHORT = {"--users": "-u", "--spawn-rate": "-r", "--run-time": "-t", "--host": "-H", "--stop-timeout": "-s"}
PAGE_HOST, PAGE_PORT = "127.0.0.1", 8089
STATUS_LIMIT_S = 30
UNREACHABLE = 3


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes Locust; exits when there is nothing to load."""
    own, rest = _parser().parse_known_args(arguments)
    environment = dict(os.environ)
    if not given(rest, "--host", environment):
        url = running_url(own.deployment)
        if url is None:
            sys.stderr.write("Nothing runs here: start it with make up, or name a server with --host URL.\n")
            sys.exit(UNREACHABLE)
        rest = [*rest, "--host", url]
    report = own.report_dir or f"build/load/{time.strftime('%Y%m%d-%H%M%S')}"
    line = locust_line(own.workload, own.page, report, rest, environment)
    if own.page:
        sys.stderr.write(f"Page:   http://{PAGE_HOST}:{PAGE_PORT} (Ctrl-C ends it)\n")
    _become(line, environment)


def _become(line: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """A signal then reaches Locust itself, and its exit code is ours."""
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *line], environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make load ARGS=...", description="Put load on a server.", allow_abbrev=False,
        epilog="Everything else is Locust's, such as --host, --users, --run-time, --shape: see docs/load.md.",
    )  # fmt: skip
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="mixed", help="Kind of users.")
    parser.add_argument("--deployment", default="", help="Whose URL is asked for without --host.")
    parser.add_argument("--page", action="store_true", help="Start Locust's page, not a run at once.")
    parser.add_argument("--report-dir", default="", help="Folder of the report.")
    return parser


def given(arguments: Sequence[str], option: str, environment: Mapping[str, str]) -> bool:
    """True when Locust's `option` is in the arguments or in Locust's own environment variable."""
    variable = "LOCUST_" + option.removeprefix("--").replace("-", "_").upper()
    short = SHORT.get(option)
    return variable in environment or any(
        argument == option
        or argument.startswith(f"{option}=")
        or (short is not None and argument.startswith(short) and not argument.startswith("--"))
        for argument in arguments
    )


def locust_line(
    workload: str, page: bool, report: str, rest: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Locust's arguments, after those of Python."""
    line = ["-m", "locust", "-f", str(ROOT / "locustfiles" / WORKLOADS[workload])]
    for option, value in DEFAULTS.items():
        if not given(rest, option, environment):
            line += [option, value]
    if page:
        line += ["--web-host", PAGE_HOST, "--web-port", str(PAGE_PORT)]
    else:
        line += ["--headless", "--only-summary"]
    files = ["--html", f"{report}/report.html", "--csv", f"{report}/load", "--report-dir", report]
    return [*line, *files, *rest]


def running_url(deployment: str) -> str | None:
    """The gateway of the deployment that runs here."""
    line = [sys.executable, "-m", "orchestrator.cli", "status", "--json"]
    try:
        done = subprocess.run(
            [*line, *(("--deployment", deployment) if deployment else ())],
            capture_output=True, text=True, timeout=STATUS_LIMIT_S, cwd=ROOT,
        )  # fmt: skip
        return str(json.loads(done.stdout)["url"]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
