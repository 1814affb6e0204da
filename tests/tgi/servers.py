"""TGI's own server as processes of a test: started, watched until its sockets are there, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from orchestrator.embedded.redis import end_with_owner

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).resolve().parent / "stand_in"
ATTENTION_VARIABLE = "TGI_TEST_ATTENTION"
"""Names TGI's own attention on a GPU, such as `flashinfer`; without it the stand-in serves on the CPU."""
STOCK = "text_generation_server.cli"
OVERLAY = "tgi_patches.entrypoint.text_generation_server"

START_LIMIT_S = 120.0
GRACE_S = 10.0
"""TGI looks twice a second whether it was asked to stop."""
POLL_S = 0.05
KEPT = 4
"""Shared servers at a time: one of the small model takes up to 1.9 GB."""
LOG_LINES = 25


class ServerFailedError(Exception):
    """A server that did not come up; the end of its log is in the message."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to start; equal plans may share a server."""

    model: Path
    flash: bool = True
    """FlashCausalLM on the stand-in for IPEX; False is CausalLM on plain torch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_dtype: Literal["fp8_e5m2"] | None = None
    """None keeps the KV cache in `dtype`."""
    attention: Literal["flashdecoding-ipex", "paged"] = "flashdecoding-ipex"
    overlay: bool = False
    threads: int = 1
    """The same on both sides of a comparison: the number changes how sums round."""
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """On top of all else, such as LORA_ADAPTERS or the overlay's spec."""
    flags: tuple[str, ...] = ()
    """Passed on to `serve`, such as `--speculate 2`."""


@dataclass(frozen=True, slots=True)
class Server:
    """One rank or several, while they run."""

    plan: ServerPlan
    uds: Path
    """What clients append `-<rank>` to."""
    logs: tuple[Path, ...]
    processes: tuple[subprocess.Popen[bytes], ...]

    def socket(self, rank: int = 0) -> Path:
        return socket_of(self.uds, rank)

    def log(self, rank: int = 0) -> str:
        """All that this rank has written so far."""
        return self.logs[rank].read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)


class Servers:
    """Starts servers of one session and keeps those that tests may share."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._kept: dict[ServerPlan, tuple[Server, contextlib.ExitStack]] = {}

    def shared(self, plan: ServerPlan) -> Server:
        """The session's server for `plan`, started again if it has ended.

        For tests that one after the other leave no batch behind; Warmup may be called again.  Only the
        KEPT servers that were asked for last go on running.
        """
        server, stack = self._kept.pop(plan, None) or self._start(plan)
        if not server.alive:
            stack.close()
            server, stack = self._start(plan)
        self._kept[plan] = server, stack
        while len(self._kept) > KEPT:
            self._stop_oldest()
        return server

    def own(self, plan: ServerPlan) -> contextlib.AbstractContextManager[Server]:
        """A server of the caller alone, stopped at the end of the block."""
        if os.environ.get(ATTENTION_VARIABLE) and plan.flash and plan.dtype == "float32":
            pytest.skip("TGI serves no float32 on a GPU")
        return running(plan, self._python, self._folder)

    def close(self) -> None:
        """Stop what was shared."""
        while self._kept:
            self._stop_oldest()

    def _start(self, plan: ServerPlan) -> tuple[Server, contextlib.ExitStack]:
        stack = contextlib.ExitStack()
        return stack.enter_context(self.own(plan)), stack

    def _stop_oldest(self) -> None:
        _, stack = self._kept.pop(next(iter(self._kept)))
        stack.close()


@contextlib.contextmanager
def running(plan: ServerPlan, python: Path, folder: Path, limit_s: float = START_LIMIT_S) -> Iterator[Server]:
    """The started server, its logs in `folder`; ServerFailedError when it does not come up in time."""
    # A short path: a socket's has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="tgi-") as short, contextlib.ExitStack() as stack:
        server = _launched(plan, python, Path(short) / "s", folder, stack)
        _await_sockets(server, limit_s)
        yield server


def command_of(plan: ServerPlan, python: Path, uds: Path) -> list[str]:
    """What runs as one rank."""
    command = [str(python), "-m", OVERLAY if plan.overlay else STOCK, "serve", str(plan.model)]
    command += ["--uds-path", str(uds)]
    if plan.dtype != "float32":
        command += ["--dtype", plan.dtype]
    if plan.kv_dtype:
        command += ["--kv-cache-dtype", plan.kv_dtype]
    if plan.ranks > 1:
        command.append("--sharded")
    return [*command, *plan.flags]


def environment_of(plan: ServerPlan, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of one rank; `port` is where the ranks find each other."""
    kept = {name: value for name, value in base.items() if not name.startswith("ORCHESTRATOR_")}
    gpu = base.get(ATTENTION_VARIABLE)
    paths = [str(STAND_IN)] * (plan.flash and not gpu) + [str(ROOT)] * plan.overlay
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [base.get("PYTHONPATH")])]),
        "ATTENTION": gpu or plan.attention,
        **({"USE_FLASH_ATTENTION": "false"} if gpu and not plan.flash else {}),
        "PREFIX_CACHING": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(plan.threads),
        "MKL_NUM_THREADS": str(plan.threads),
        "PYTHONUNBUFFERED": "1",
        **({"IPEX_STAND_IN_DTYPE": plan.dtype} if plan.flash and not gpu else {}),
        **(_ranks(plan, rank, port) if plan.ranks > 1 else {}),
        **plan.env,
    }


def socket_of(uds: Path, rank: int) -> Path:
    return uds.with_name(f"{uds.name}-{rank}")


def _ranks(plan: ServerPlan, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _launched(plan: ServerPlan, python: Path, uds: Path, folder: Path, stack: contextlib.ExitStack) -> Server:
    """All ranks as processes that the stack stops."""
    logs_folder = Path(tempfile.mkdtemp(prefix="server-", dir=folder))
    port = _free_port()
    logs, processes = [], []
    for rank in range(plan.ranks):
        logs.append(logs_folder / f"{rank}.log")
        environment = environment_of(plan, rank, port, os.environ)
        with logs[-1].open("wb") as log:
            process = subprocess.Popen(
                command_of(plan, python, uds),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=logs_folder,
                env=environment,
                preexec_fn=end_with_owner(os.getpid()),
            )
        stack.callback(_stop, process)
        processes.append(process)
    return Server(plan, uds, tuple(logs), tuple(processes))


def _await_sockets(server: Server, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not all(server.socket(rank).is_socket() for rank in range(server.plan.ranks)):
        for rank, process in enumerate(server.processes):
            if process.poll() is not None:
                raise _failed(server, rank, f"ended with code {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise _failed(server, 0, f"was not ready after {limit_s:.0f} s")
        time.sleep(POLL_S)


def _failed(server: Server, rank: int, what: str) -> ServerFailedError:
    last = "\n".join(server.log(rank).splitlines()[-LOG_LINES:])
    return ServerFailedError(f"TGI's server (rank {rank}) {what}; its last lines:\n{last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def absolute_python(named: str) -> Path | None:
    """The interpreter that a variable names: a path, or a command on PATH.

    Not resolved: a virtual environment is found by the link that its interpreter is.
    """
    found = shutil.which(named)
    return Path(found).absolute() if found else None
