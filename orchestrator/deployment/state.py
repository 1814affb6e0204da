"""What `up` writes down so that `down`, `status`, `logs` and `verify` find the deployment again.

The lock decides whether a deployment runs: the kernel drops it with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError
from tgi_patches.contract import ContractError, ShardSpec, checked_part

APPLICATION = "tgi-orchestrator"
STATE_VERSION = 1
DOCKER = "docker"
TEMPORARY = "verify-"
"""Names of deployments that are started for one command begin so."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class State:
    """A running deployment, as its state file tells it.  Holds no secret and no prompt."""

    deployment: str
    pid: int
    pid_started: int
    """Start time of that process in clock ticks since boot: a recycled pid has another."""
    url: str
    redis_url: str
    model_name: str
    dtype: str
    arena_dir: str
    specs: tuple[ShardSpec, ...]
    logs: Mapping[str, str] = field(default_factory=dict)
    """Log file by shard name, and of `conductor` and `gateway`."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """By name, of the shards that somebody else keeps."""
    admin_url: str = ""
    """Of `/admin` and `/metrics`, where that is not `url`."""
    admin_token_file: str = ""
    """The token that they ask for; its file is ours to read as it was the gateway's."""
    tls_cert: str = ""
    """The certificate that the gateway shows; empty without TLS."""
    api_keys: bool = False
    """Clients need a key."""
    launcher: str = "process"
    docker_host: str = ""
    """The engine of the shards' containers; empty for the one that the environment names."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was started with, by dotted key, without passwords: `apply` compares with it."""
    version: int = STATE_VERSION

    @property
    def launched(self) -> tuple[ShardSpec, ...]:
        """The shards that `up` started."""
        return tuple(spec for spec in self.specs if spec.shard not in self.urls)

    @property
    def in_containers(self) -> bool:
        """Shards outlive `up`: SIGTERM leaves them serving, SIGINT removes them."""
        return self.launcher == DOCKER

    def to_json(self) -> str:
        raw = dataclasses.asdict(self)
        raw["specs"] = [spec.to_dict() for spec in self.specs]
        return json.dumps(raw, indent=2)

    @classmethod
    def from_json(cls, text: str) -> State:
        raw: dict[str, Any] = json.loads(text)
        if not isinstance(raw, dict):
            raise TypeError("A state file holds an object.")
        order = ShardOrder if raw.get("launcher") == DOCKER else ShardSpec
        raw["specs"] = tuple(order.from_dict(spec) for spec in raw["specs"])
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """`$XDG_STATE_HOME/tgi-orchestrator/<deployment>`, readable by its owner only."""

    path: Path

    @classmethod
    def of(cls, deployment: str, env: Mapping[str, str]) -> StateFolder:
        try:
            name = checked_part(deployment, "deployment name")
        except ContractError as error:
            raise ConfigError(str(error)) from error
        base = Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/")) / ".local" / "state")
        return cls(base / APPLICATION / name)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def _file(self) -> Path:
        return self.path / "state.json"

    def owner(self) -> str:
        """By which containers are told to be launched from this folder; made when it is first asked for."""
        path = self.path / "owner"
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            path.write_text(secrets.token_hex(8))
            return path.read_text()
        except OSError as error:
            raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from None

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"The state folder {self.path} cannot be created: {error.strerror}.") from error

    def write(self, state: State) -> None:
        """Replace the state file in one step, so that a reader never sees half of it."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(state.to_json())
        fresh.chmod(0o600)
        fresh.replace(self._file)

    def read(self) -> State | None:
        """What the last `up` wrote; None when there is nothing readable."""
        try:
            return State.from_json(self._file.read_text())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def running(self) -> State | None:
        """The state of a deployment whose `up` process lives; None otherwise."""
        state = self.read()
        if state is None or started_ticks(state.pid) != state.pid_started:
            return None
        return state

    def abandoned(self) -> list[StateFolder]:
        """Folders beside this one whose `up` process was killed: they still have a state file."""
        beside = (StateFolder(path.parent) for path in self.path.parent.glob("*/state.json"))
        return [folder for folder in beside if folder != self and folder.running() is None]

    def forget(self) -> None:
        """Remove the state file; the logs stay until the next `up`."""
        self._file.unlink(missing_ok=True)

    def clear_logs(self) -> None:
        """Begin every log anew; a reader that follows one notices."""
        for path in self.logs.glob("*.log*"):
            path.write_bytes(b"")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the deployment's lock; ConfigError when another `up` holds it."""
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(self._already()) from None
            yield

    def _already(self) -> str:
        name, state = self.path.name, self.running()
        where = f" at {state.url} (process {state.pid})" if state else ""
        flag = "" if name == "default" else f" -d {name}"
        return f"The deployment {name!r} already runs{where}: stop it with `tgi-orchestrator down{flag}`."


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def stop(state: State, timeout_s: float) -> bool:
    """Have the `up` process stop everything, and wait for its end; False where it lives after `timeout_s`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGINT if state.in_containers else signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while started_ticks(state.pid) == state.pid_started:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
