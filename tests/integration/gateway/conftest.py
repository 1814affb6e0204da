"""A gateway on a real socket before scripted shards on real sockets, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from orchestrator.api.app import GatewaySettings, create_app
from orchestrator.api.connection import ClientConnection
from orchestrator.core.decision import Decision
from orchestrator.core.sse import Event, Parser
from orchestrator.core.ticket import Completion, Grant, Relayed, SharedRecord, Ticket
from orchestrator.queues import FakeQueue
from orchestrator.shards.client import Deadlines, ShardClient
from orchestrator.shards.fake import FakeShard
from tgi_patches.contract import Limits, Role

PATIENCE_S = 20.0


class CountingQueue(FakeQueue):
    """Remembers every word that a gateway said, also the ones that changed nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tickets: list[Ticket] = []
        self.completed: list[Completion] = []
        self.cancelled: list[str] = []
        self.submitted = asyncio.Event()
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.relays = asyncio.Event()
        """A record was said to be imported."""
        self.share_of: Grant | None = None
        """While it is set, each request is to answer from the record of this earlier one."""

    async def submit(self, ticket: Ticket) -> Grant:
        self.tickets.append(ticket)
        self.submitted.set()
        return await super().submit(ticket)

    def complete(self, completion: Completion) -> Awaitable[None]:
        if completion.handle not in self.cancelled:
            self.completed.append(completion)
            self.words.put_nowait("complete")
        return super().complete(completion)

    def relayed(self, relayed: Relayed) -> None:
        super().relayed(relayed)
        self.relays.set()

    def cancel(self, handle: str) -> Awaitable[None]:
        self.cancelled.append(handle)
        self.words.put_nowait("cancel")
        return super().cancel(handle)

    def _apply(self, ticket: Ticket, decision: Decision) -> None:
        if self.share_of is not None and isinstance(decision, Grant):
            owner = self.share_of.prefill
            assert owner is not None
            record = SharedRecord(self.share_of.handle, owner)
            decision = dataclasses.replace(
                decision, reason="shared", prefill=None, record_bytes=0, shared=record
            )
        super()._apply(ticket, decision)


class InLoopServer(uvicorn.Server):
    """Leaves signals to pytest, and stops when told instead of at its next tick."""

    def __init__(self, app: Any, *, lifespan: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        # Connections inherit it; asyncio itself leaves it out for a socket made like this one.
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.stop = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=ClientConnection,
                log_config=None,
                access_log=False,
                lifespan=lifespan,
                timeout_graceful_shutdown=1,
            )
        )
        self.force_exit = lifespan == "off"

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def all_listening(*servers: InLoopServer) -> AsyncIterator[None]:
    """Up inside; outside they have stopped, all at once, because each takes its time."""
    tasks = [asyncio.create_task(server.serve(sockets=[server.listener])) for server in servers]
    try:
        yield
    finally:
        for server in servers:
            server.stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


@dataclass
class House:
    """The parts of a running deployment."""

    url: str
    http: httpx.AsyncClient
    queue: CountingQueue
    prefill: FakeShard
    decode: FakeShard

    async def settled(self) -> None:
        """Until the queue has heard that one more request is over."""
        await asyncio.wait_for(self.queue.words.get(), PATIENCE_S)

    async def quiet(self) -> None:
        """Until no shard serves anybody."""
        async with asyncio.timeout(PATIENCE_S):
            await self.prefill.idle.wait()
            await self.decode.idle.wait()

    @property
    def reserved(self) -> tuple[int, int, int]:
        """KV tokens, slots and records that somebody still holds."""
        views = self.queue.shards()
        return (
            sum(view.reserved_kv_tokens for view in views),
            sum(view.reserved_slots for view in views),
            sum(view.outstanding_records for view in views),
        )

    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


LIMITS = Limits(max_input_tokens=400, max_total_tokens=500, payload_bytes=100_000)
HouseOf = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def house_of() -> HouseOf:
    """Builds deployments; keywords are fields of the settings, `deadlines`, or `shards`."""

    @asynccontextmanager
    async def build(
        *,
        deadlines: Deadlines | None = None,
        key: bytes = b"",
        roles: tuple[Role, Role] = (Role.PREFILL, Role.DECODE),
        **settings: Any,
    ) -> AsyncIterator[House]:
        prefill, decode = (FakeShard(f"{role}-{i}", role, limits=LIMITS) for i, role in enumerate(roles))
        queue = CountingQueue()
        chosen = dataclasses.replace(GatewaySettings(limits=LIMITS, model_name="served/model"), **settings)
        app = create_app(chosen, queue=queue, shards=ShardClient(deadlines, key=key))
        servers = [InLoopServer(shard, lifespan="off") for shard in (prefill, decode)]
        prefill.url, decode.url = (server.url for server in servers)
        gateway = InLoopServer(app, lifespan="on")
        async with (
            all_listening(*servers, gateway),
            httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False) as http,
        ):
            queue.set_shards([prefill.view(), decode.view()])
            yield House(gateway.url, http, queue, prefill, decode)

    return build


@pytest.fixture
async def house(house_of: HouseOf) -> AsyncIterator[House]:
    """One prefill and one decode shard."""
    async with house_of() as built:
        yield built


@pytest.fixture
def events_of() -> Callable[[bytes], list[Event]]:
    """All events of a stream that is over, comments included."""

    def read(body: bytes) -> list[Event]:
        parser = Parser()
        return parser.feed(body) + parser.finish()

    return read


@pytest.fixture
def payloads_of(events_of: Callable[[bytes], list[Event]]) -> Callable[[bytes], list[Any]]:
    """The JSON payloads of a stream, `[DONE]` as that string."""

    def read(body: bytes) -> list[Any]:
        datas = [event.data for event in events_of(body) if event.data is not None]
        return ["[DONE]" if data == b"[DONE]" else orjson.loads(data) for data in datas]

    return read


@pytest.fixture
def listening() -> Callable[[Any], AbstractAsyncContextManager[str]]:
    """Puts an application on a port; gives its base URL."""

    @asynccontextmanager
    async def serve(app: Any) -> AsyncIterator[str]:
        server = InLoopServer(app, lifespan="on")
        async with all_listening(server):
            yield server.url

    return serve
