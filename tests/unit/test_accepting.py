"""Who takes a connection that several workers could take: whoever holds the fewest, and always somebody."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.commands.accepting import Acceptor, Turns
from orchestrator.deployment.gateway import bound_socket, listen
from orchestrator.deployment.shares import CLOSED, Shares


class Taker(asyncio.Protocol):
    """A worker's side of its connections."""

    def __init__(self, held: list[asyncio.BaseTransport]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held.append(transport)


class Worker:
    """One acceptor on a socket that others share, all in this event loop."""

    def __init__(self, listener: socket.socket, shares: Shares | None, number: int) -> None:
        self.held: list[asyncio.BaseTransport] = []
        self.acceptor = Acceptor(
            listener.dup(),
            lambda: Taker(self.held),
            None,
            Turns(shares, number),
            lambda: len(self.held) + self.acceptor.opening,
        )

    async def stop(self) -> None:
        self.acceptor.close()
        await self.acceptor.wait_closed()
        for transport in self.held:
            transport.close()


@contextmanager
def shared(tmp_path: Path, workers: int) -> Iterator[tuple[socket.socket, Shares]]:
    shares = Shares(tmp_path, workers)
    with bound_socket("127.0.0.1", 0) as listener:
        listen(listener)
        yield listener, shares
    shares.close()


@contextmanager
def clients(listener: socket.socket, count: int) -> Iterator[None]:
    made = [socket.create_connection(listener.getsockname()) for _ in range(count)]
    try:
        yield
    finally:
        for each in made:
            each.close()


async def until_held(workers: list[Worker], count: int) -> list[int]:
    async with asyncio.timeout(20):
        while sum(len(each.held) for each in workers) < count:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.001)
    return [len(each.held) for each in workers]


@pytest.mark.parametrize("workers", [2, 3])
async def test_a_burst_is_shared_evenly(tmp_path: Path, workers: int) -> None:
    with shared(tmp_path, workers) as (listener, shares), clients(listener, 24):
        all_of_them = [Worker(listener, shares, number) for number in range(workers)]
        held = await until_held(all_of_them, 24)
        for each in all_of_them:
            await each.stop()
    assert min(held) >= 24 // workers - 3


async def test_who_holds_more_leaves_new_connections_to_the_other(tmp_path: Path) -> None:
    with shared(tmp_path, 2) as (listener, shares), clients(listener, 6):
        first = Worker(listener, shares, 0)
        assert await until_held([first], 6) == [6]
        second = Worker(listener, shares, 1)
        shares.put(1, 0)  # it has seen nothing yet: that is CLOSED
        with clients(listener, 4):
            assert await until_held([first, second], 10) == [6, 4]
        for each in (first, second):
            await each.stop()


async def test_a_worker_that_sees_nothing_delays_the_others_and_loses_nothing(tmp_path: Path) -> None:
    with shared(tmp_path, 2) as (listener, shares), clients(listener, 5):
        shares.put(1, 0)  # it hangs
        only = Worker(listener, shares, 0)
        assert await until_held([only], 5) == [5]
        await only.stop()


async def test_one_worker_alone_takes_all_that_waits() -> None:
    with bound_socket("127.0.0.1", 0) as listener:
        listen(listener)
        with clients(listener, 100):
            only = Worker(listener, None, 0)
            assert await until_held([only], 100) == [100]
            await only.stop()


async def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.commands.accepting.PAUSE_S", 0.01)
    accept, refusals = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE])

    def exhausted(listener: socket.socket) -> tuple[socket.socket, object]:
        if number := next(refusals, None):
            raise OSError(number, "no descriptors")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    with bound_socket("127.0.0.1", 0) as listener:
        listen(listener)
        with clients(listener, 1):
            only = Worker(listener, None, 0)
            assert await until_held([only], 1) == [1]
            await only.stop()


async def test_a_client_that_does_not_speak_tls_costs_only_its_own_connection() -> None:
    held: list[asyncio.BaseTransport] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with bound_socket("127.0.0.1", 0) as listener:
        listen(listener)
        acceptor = Acceptor(listener.dup(), lambda: Taker(held), context, Turns(None, 0), lambda: 0)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()
        assert (held, acceptor.opening) == ([], 0)
        acceptor.close()
        await acceptor.wait_closed()


def test_shares_begin_closed_and_the_closed_are_waited_for_by_nobody(tmp_path: Path) -> None:
    shares, again = Shares(tmp_path, 3), Shares(tmp_path, 3)
    shares.put(0, 5)
    assert again.turn_of(0)
    again.put(2, 4)
    assert (shares.turn_of(0), shares.turn_of(2)) == (False, True)
    shares.put(0, 80)
    again.put(2, 69)
    assert not shares.turn_of(0)
    again.put(2, 70)
    assert shares.turn_of(0)
    again.put(2, CLOSED)
    assert shares.turn_of(0)
    for each in (shares, again):
        each.close()
