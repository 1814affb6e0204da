"""Shards of several ranks in one process: a follower is a thread with an event loop of its own.

Everything else is real: channel, gloo, arenas.  A process per rank takes seconds to import torch.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from orchestrator.embedded.shard.assemble import opened
from orchestrator.embedded.shard.ranks.assemble import opened as opened_ranks
from orchestrator.embedded.shard.ranks.follower import follow
from orchestrator.embedded.shard.server import ShardServer, create_app
from tgi_patches.contract import GetTag, PutTag, Role, ShardSpec, StatusReply, WaitReply, new_handle

LONG_S = 20.0


class Thread:
    """In place of a follower's process.  To be killed is to lose its channel."""

    pid = 0

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._code = -1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return self._code

    def kill(self) -> None:
        if self._thread.is_alive():
            self._end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        self._code = asyncio.run(follow(self._end))


async def in_thread(end: socket.socket) -> Thread:
    return Thread(end.dup())


def spec(model: Path, arenas: Path, role: Role, ranks: int, **changes: Any) -> ShardSpec:
    values: dict[str, Any] = {
        "deployment": "test",
        "shard": f"{role}-{ranks}",
        "role": role,
        "model": str(model),
        "model_name": "tiny",
        "arena_dir": str(arenas),
        "arena_bytes": 24 << 20 if role is Role.PREFILL else 0,
        "max_input_tokens": 190,
        "max_total_tokens": 250,
        "tensor_parallel": ranks,
    }
    return ShardSpec(**values | changes)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Returns once it holds; a test fails where that takes long."""
    async with asyncio.timeout(LONG_S):
        while not await condition():  # noqa: ASYNC110 - a shard tells no event
            await asyncio.sleep(0.01)


class Client:
    """Asks a shard, in process."""

    def __init__(self, server: ShardServer, http: httpx.AsyncClient, shard: str) -> None:
        self.server = server
        self.shard = shard
        self._http = http

    async def ask(self, inputs: str, new_tokens: int, tag: PutTag | GetTag | None = None, **more: Any) -> Any:
        """(token ids, import result) of one answer."""
        parameters = {"max_new_tokens": new_tokens, "details": True, **more}
        if tag is not None:
            parameters["adapter_id"] = str(tag)
        response = await self._http.post("/generate", json={"inputs": inputs, "parameters": parameters})
        assert response.status_code == 200, response.text
        ids = [token["id"] for token in response.json()["details"]["tokens"]]
        return ids, response.headers.get("x-orchestrator-import")

    async def put(self, inputs: str) -> GetTag:
        """Leave the record of a prompt behind; how to get it."""
        handle = new_handle()
        await self.ask(inputs, 1, PutTag(handle))
        reply = await self.wait(handle)
        assert reply.found, reply.reason
        return GetTag(handle, self.shard, (await self.status()).epoch, reply.first_token_id)

    async def wait(self, handle: str, timeout_s: float = 5.0) -> WaitReply:
        response = await self._http.get(f"/kv/wait/{handle}", params={"timeout_s": timeout_s})
        return WaitReply.from_dict(response.json())

    async def status(self) -> StatusReply:
        return StatusReply.from_dict((await self._http.get("/kv/status")).json())


@asynccontextmanager
async def serving(order: ShardSpec) -> AsyncIterator[Client]:
    """A running shard; its followers are threads."""
    made = opened(order) if order.tensor_parallel == 1 else opened_ranks(order, in_thread)
    async with made as server:
        app = create_app(server)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://shard", timeout=30
            ) as http,
        ):
            yield Client(server, http, order.shard)
