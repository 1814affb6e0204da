"""The gateway as a child: it takes over our socket, comes back after a crash, and goes when we go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.deployment.gateway import GatewayProcess, bound_socket, listen, url_of
from orchestrator.errors import ConfigError

ECHO_PID = """
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
print(os.environ["GREETING"], file=sys.stderr, flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(f"{os.getpid()}\\n".encode())
    connection.close()
"""


def echo_pid(listener: socket.socket, log_file: Path) -> GatewayProcess:
    """A gateway that answers every connection with its process id."""
    command = (sys.executable, "-c", ECHO_PID)
    return GatewayProcess(listener, {**os.environ, "GREETING": "hello"}, log_file, command)


async def asked(port: int, *, first: bool = False) -> int:
    """The answering process; `first` waits until somebody listens at all.

    A process that is being killed may still accept: who was accepted by it is not answered and asks again.
    """
    async with asyncio.timeout(30):
        while True:
            try:
                answer = await _line_from(port)
            except ConnectionRefusedError:
                if not first:
                    raise
                answer = b""
            if answer:
                return int(answer)
            await asyncio.sleep(0.01)


async def _line_from(port: int) -> bytes:
    """What the process at `port` says; empty where it ended before it said anything."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()


def test_a_port_that_is_taken_is_refused_in_one_sentence() -> None:
    with bound_socket("127.0.0.1", 0) as first, bound_socket("127.0.0.1", first.getsockname()[1]) as second:
        port = first.getsockname()[1]
        listen(first)
        said = rf"cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(ConfigError, match=said):
            listen(second)
        with pytest.raises(ConfigError, match=said):
            bound_socket("127.0.0.1", port)


def test_an_address_for_all_interfaces_has_a_url_that_a_client_here_can_use() -> None:
    with bound_socket("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_crashed_gateway_is_replaced_on_the_same_port(tmp_path: Path) -> None:
    listener = bound_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    gateway = echo_pid(listener, tmp_path / "gateway.log")
    async with gateway.running():
        first = await asked(port, first=True)
        os.kill(first, signal.SIGKILL)
        second = await asked(port)
        assert (gateway.restarts, second) == (1, gateway.pid)
        assert second != first
    assert (tmp_path / "gateway.log").read_text() == "hello\nhello\n"


async def test_nobody_listens_and_nothing_runs_after_the_end(tmp_path: Path) -> None:
    listener = bound_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with echo_pid(listener, tmp_path / "gateway.log").running():
        pid = await asked(port, first=True)
    with pytest.raises(ConnectionRefusedError):
        await asked(port)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_gateway_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.stderr.write('Bad thing.\\n'); sys.exit(2)")
    log_file = tmp_path / "gateway.log"
    listener = bound_socket("127.0.0.1", 0)
    gateway = GatewayProcess(listener, os.environ, log_file, command)
    async with gateway.running() as watch:
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"^Bad thing\.$"):
                await watch
        assert gateway.restarts == 0
