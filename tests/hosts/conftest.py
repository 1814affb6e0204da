"""Two hosts as network namespaces: A with a prefill shard, B with a decode shard, conductor and gateway.

They are joined by a veth pair and share no arena folder; the test's own namespace reaches only B.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

COMMAND_LIMIT_S = 600
LIMIT_S = 60
CLI = (sys.executable, "-m", "orchestrator.cli")
PROXY = (sys.executable, str(Path(__file__).with_name("proxy.py")))
SHARD_PORT, PULL_PORT, GATEWAY_PORT = 3001, 3101, 3000


def missing() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid():
        return "two hosts as network namespaces need root"
    if shutil.which("ip") is None:
        return "two hosts as network namespaces need the command ip"
    probe = f"tgio-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and (why := missing()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=why))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass
class Host:
    """One namespace."""

    name: str
    link: str
    """Its end of the pair that joins the two."""
    address: str
    arena: Path

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def sent_bytes(self) -> int:
        """Over its link."""
        (told,) = json.loads(run("ip", "-n", self.name, "-s", "-j", "link", "show", self.link))
        return int(told["stats64"]["tx"]["bytes"])

    def set_link(self, state: str) -> None:
        run("ip", "-n", self.name, "link", "set", self.link, state)

    @contextlib.contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """What it sends is held to `rate`, such as 2mbit, by a token bucket of the kernel."""
        on = ("tc", "-n", self.name, "qdisc")
        run(*on, "add", "dev", self.link, "root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        try:
            yield
        finally:
            run(*on, "delete", "dev", self.link, "root")


@dataclass
class Hosts:
    """Both, and what runs there."""

    a: Host
    b: Host
    url: str
    """The gateway's, from the test's own namespace."""
    env: dict[str, str]
    key_file: Path
    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # --- host A ---

    def start_shard(self, role: str, *flags: str) -> None:
        """Stays in the foreground, under the name of its role."""
        where = ("--role", role, "--listen", f"{self.a.address}:{SHARD_PORT}", "--cpus", "0")
        command = self.a.command(*CLI, "shard", *where, *flags, "--key-file", str(self.key_file))
        self._start(role, command, self.env | {"ORCHESTRATOR_ARENA__DIR": str(self.a.arena)})

    def start_prefill(self, pull_listen: str) -> None:
        self.start_shard("prefill", "--pull-listen", pull_listen)

    def start_proxy(self, listen: str, target: str, flip_file: Path) -> None:
        self._start("proxy", self.a.command(*PROXY, listen, target, str(flip_file)), self.env)

    def stop(self, name: str) -> int:
        process = self.running.pop(name)
        process.terminate()
        return process.wait(30)

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    # --- host B ---

    def cli_on_b(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """`changes` of the environment; an empty value is none."""
        env = self.env | {
            "ORCHESTRATOR_ARENA__DIR": str(self.b.arena),
            "ORCHESTRATOR_KEY_FILE": str(self.key_file),
            "ORCHESTRATOR_GATEWAY__LISTEN": f"0.0.0.0:{GATEWAY_PORT}",
            "ORCHESTRATOR_GATEWAY__ALLOW_ANONYMOUS": "true",
            "ORCHESTRATOR_SHARDS__PREFILL__URLS": json.dumps([f"http://{self.a.address}:{SHARD_PORT}"]),
            "ORCHESTRATOR_SHARDS__DECODE__CPUS": "[[1]]",
            **changes,
        }
        return subprocess.run(
            self.b.command(*CLI, *arguments), capture_output=True, text=True, env=env, timeout=COMMAND_LIMIT_S
        )

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/admin/status", timeout=10).json()
        return told

    def state_of(self, shard: str) -> str:
        return next((one["state"] for one in self.status()["shards"] if one["shard"] == shard), "unknown")

    def pulls(self) -> dict[str, float]:
        """By result."""
        found: dict[str, float] = self.status()["counters"]["kv_pulls"]
        return found

    def pulled_bytes(self) -> float:
        return float(self.status()["counters"]["kv_pulled_bytes"].get("", 0.0))

    def until(self, condition: Any, what: str) -> Any:
        """The first true value of `condition()`."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.TransportError):
                if value := condition():
                    return value
            time.sleep(0.02)
        logs = "".join(self.log_of(name)[-1500:] for name in ("prefill",))
        raise AssertionError(f"{what} did not happen within {LIMIT_S} s; {logs}")


@pytest.fixture(scope="module")
def hosts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A prefill shard on A, `up` with it on B, both ready."""
    unique = uuid.uuid4().hex[:8]
    name = f"hosts-{unique}"
    folder = Path(tmp_path_factory.mktemp("s", numbered=True))
    key_file = folder / "key"
    key_file.write_text(secrets.token_hex(32))
    key_file.chmod(0o600)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
    env = kept | {
        "XDG_STATE_HOME": str(folder),
        "TMPDIR": str(folder),
        "ORCHESTRATOR_DEPLOYMENT": name,
        "ORCHESTRATOR_MODEL__ID": str(tiny_model),
        "ORCHESTRATOR_MODEL__DTYPE": "float32",
        "ORCHESTRATOR_ROUTING__CHOICE": "separated",
    }
    with _namespaces() as (a, b, reached):
        made = Hosts(a, b, f"http://{reached}:{GATEWAY_PORT}", env, key_file, folder)
        try:
            made.start_prefill(f"{a.address}:{PULL_PORT}")
            up = made.cli_on_b("up", "--detach")
            assert up.returncode == 0, up.stderr + made.log_of("prefill")
            made.until(lambda: made.state_of("prefill-0") == "ready", "the prefill shard on A")
            yield made
        finally:
            _end(name)
            for process in made.running.values():
                process.wait(10)
            for arena in (a.arena, b.arena):
                shutil.rmtree(arena, ignore_errors=True)


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[Host, Host, str]]:
    """A, B, and B's address in the test's own namespace; what is left of it is removed in any case."""
    pid = os.getpid()
    number = 2 * (pid % 125)
    inner, outer = f"10.77.{number}", f"10.77.{number + 1}"
    a, b = (
        Host(f"tgio-{side}-{pid}", f"v{side}{pid}", f"{inner}.{end}", Path(f"/dev/shm/tgio-{side}-{pid}"))
        for end, side in enumerate("ab", start=1)
    )
    to_test, to_b = f"vt{pid}", f"vu{pid}"
    try:
        for host in (a, b):
            run("ip", "netns", "add", host.name)
            run("ip", "-n", host.name, "link", "set", "lo", "up")
        run("ip", "link", "add", a.link, "netns", a.name, "type", "veth", "peer", b.link, "netns", b.name)
        run("ip", "link", "add", to_test, "type", "veth", "peer", to_b, "netns", b.name)
        for at, link, address in (
            (("-n", a.name), a.link, a.address),
            (("-n", b.name), b.link, b.address),
            (("-n", b.name), to_b, f"{outer}.2"),
            ((), to_test, f"{outer}.1"),
        ):
            run("ip", *at, "address", "add", f"{address}/24", "dev", link)
            run("ip", *at, "link", "set", link, "up")
        yield a, b, f"{outer}.2"
    finally:
        subprocess.run(["ip", "link", "delete", to_test], capture_output=True)
        for host in (a, b):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def _end(deployment: str) -> None:
    """Whatever of it still runs, on either host."""
    mine = [
        one
        for one in psutil.process_iter(["environ"])
        if (one.info["environ"] or {}).get("ORCHESTRATOR_DEPLOYMENT") == deployment
    ]
    for process in mine:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(mine, timeout=10)
