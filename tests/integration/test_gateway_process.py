"""The gateway's workers as children: they take over our socket, come back after a crash, go when we go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from orchestrator.deployment.gateway import Sockets, bound_socket, last_words, listen, url_of
from orchestrator.deployment.workers import GatewayWorkers
from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection

ECHO_PID = """
import json, os, signal, socket, sys
listener = socket.socket(fileno=json.loads(sys.argv[1])["fd"])
listener.listen()
print(os.environ["GREETING"], file=sys.stderr, flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(f"{os.getpid()}\\n".encode())
    connection.close()
"""


def echo_pid(listener: socket.socket, folder: Path, count: int = 1, code: str = ECHO_PID) -> GatewayWorkers:
    """Workers that answer every connection with their process id."""
    return GatewayWorkers(
        Sockets(listener),
        {**os.environ, "GREETING": "hello"},
        folder / "workers",
        count=count,
        log_file=folder / "gateway.log",
        command=(sys.executable, "-c", code),
    )


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
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        assert url_of(listener, tls=True) == f"https://127.0.0.1:{port}"


def test_administration_may_have_a_socket_of_its_own() -> None:
    section = GatewaySection(listen="127.0.0.1:0", admin_listen="[::1]:0")
    with contextlib.closing(Sockets.bound(section)) as sockets:
        assert sockets.admin is not None
        assert url_of(sockets.admin) == f"http://[::1]:{sockets.admin.getsockname()[1]}"
        assert sockets.descriptors() == (sockets.clients.fileno(), sockets.admin.fileno())
        sockets.listen()
        taken = f"127.0.0.1:{sockets.clients.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: Address already in use"):
            Sockets.bound(GatewaySection(listen="127.0.0.1:0", admin_listen=taken))
    assert sockets.descriptors() == (-1, -1)


async def test_a_crashed_worker_is_replaced_on_the_same_port(tmp_path: Path) -> None:
    listener = bound_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    gateway = echo_pid(listener, tmp_path)
    async with gateway.running():
        first = await asked(port, first=True)
        os.kill(first, signal.SIGKILL)
        second = await asked(port)
        assert (gateway.restarts, gateway.pids) == (1, (second,))
        assert second != first
    assert (tmp_path / "gateway.log").read_text() == "hello\nhello\n"


async def test_while_a_worker_is_away_the_others_serve(tmp_path: Path) -> None:
    listener = bound_socket("127.0.0.1", 0)
    gateway = echo_pid(listener, tmp_path, count=2)
    async with gateway.running():
        await asked(listener.getsockname()[1], first=True)
        async with asyncio.timeout(30):
            while len(gateway.pids) < 2:  # noqa: ASYNC110 - another process, no event to wait for
                await asyncio.sleep(0.01)
        killed, other = gateway.pids
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(30):
            while (pid := await asked(listener.getsockname()[1])) != other:
                assert pid != killed


async def test_nobody_listens_and_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    listener = bound_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with echo_pid(listener, tmp_path).running():
        pid = await asked(port, first=True)
    with pytest.raises(ConnectionRefusedError):
        await asked(port)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert os.listdir(tmp_path) == ["gateway.log"]  # noqa: PTH208 - no await for a folder


async def test_a_worker_that_is_told_to_reload_before_it_can_does_so_later(tmp_path: Path) -> None:
    late = ECHO_PID.replace(
        "while True:",
        "signal.signal(signal.SIGHUP, lambda *_: print('reloaded', file=sys.stderr, flush=True))\n"
        "listener.accept()[0].close()\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\n"
        "while True:",
    )
    listener = bound_socket("127.0.0.1", 0)
    gateway = echo_pid(listener, tmp_path, code=late)
    async with gateway.running():
        async with asyncio.timeout(30):
            while not gateway.pids:  # noqa: ASYNC110 - another process, no event to wait for
                await asyncio.sleep(0.01)
        gateway.reload()
        await asked(listener.getsockname()[1], first=True)
        assert gateway.restarts == 0
    assert (tmp_path / "gateway.log").read_text() == "hello\nreloaded\n"


async def test_workers_that_refuse_their_settings_are_not_started_again(tmp_path: Path) -> None:
    refuses = 'import sys; sys.stderr.write(\'Bad thing.\\n{"event": "x"}\\n\'); sys.exit(2)'
    gateway = echo_pid(bound_socket("127.0.0.1", 0), tmp_path, count=2, code=refuses)
    async with gateway.running() as watch:
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"^Bad thing\.$"):
                await watch
        assert gateway.restarts == 0


def test_the_last_words_of_a_log_are_a_sentence_before_they_are_an_event(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text('{"event": "a"}\nIt went wrong.\n{"event": "b"}\n')
    assert last_words(log) == "It went wrong."
    log.write_text('{"event": "a"}\n')
    assert last_words(log) == '{"event": "a"}'
