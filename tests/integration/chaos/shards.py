"""Fake shards that take their time for each token, and whose long answers wait until they are let go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import uvicorn

from orchestrator.shards.fake import FakeShard, Fault
from orchestrator.shards.script import Ask, Part
from tgi_patches.contract import PROTOCOL_VERSION, GetTag, PutTag, Role, StatusReply, parse_tag

from .conduct import DEPLOYMENT

TOKENS = tuple(f" t{n}" for n in range(20))
LONG = len(TOKENS)
"""As many tokens: an answer that is held after its first few."""
HELD_AT = 5
STEP_S = 0.004


class SlowShard(FakeShard):
    """Answers `/kv/status` too, so that a conductor can watch it."""

    def __init__(self, name: str, role: Role, slots: int) -> None:
        super().__init__(name, role, tokens=TOKENS)
        self.slots = slots
        self.let_go = asyncio.Event()
        self.holding = 0

    def view(self, state: str = "ready") -> Any:
        return replace(super().view(state), slots=self.slots)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/kv/status":
            await super().__call__(scope, receive, send)
            return
        body = orjson.dumps(self.status().to_dict())
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def status(self) -> StatusReply:
        view = self.view()
        return StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment=DEPLOYMENT,
            shard=view.shard,
            role=view.role,
            epoch=view.epoch,
            fingerprint=view.fingerprint,
            limits=view.limits,
            kv_tokens=view.kv_tokens,
            slots=view.slots,
            ring_bytes=view.ring_bytes,
            record_limit_bytes=view.record_limit_bytes,
            bytes_per_token=view.bytes_per_token,
        )

    async def _step(self, ask: Ask, token: int) -> Fault | None:
        await asyncio.sleep(STEP_S)
        if ask.part is not Part.PUT and ask.max_new_tokens == LONG and token == HELD_AT:
            self.holding += 1
            try:
                await self.let_go.wait()
            finally:
                self.holding -= 1
        return await super()._step(ask, token)

    def legs(self, kind: type[PutTag | GetTag]) -> Counter[str]:
        """How often each handle came with this kind of leg."""
        tags = [parse_tag(seen.body.get("parameters", {}).get("adapter_id")) for seen in self.generations()]
        return Counter(tag.handle for tag in tags if isinstance(tag, kind))


class Listening(uvicorn.Server):
    """A shard on a port of its own, in this event loop."""

    def __init__(self, shard: SlowShard) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shard.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        super().__init__(uvicorn.Config(shard, log_config=None, access_log=False, lifespan="off"))
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
