"""A shard without a model: TGI's routes and the sidecar's verbs over a scripted answer.

The client's fake, for tests and for benchmarks of the gateway.  Gates hold it at any token, faults
break it there; `seen` and `left` say what reached it and who went away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from orchestrator.core.redress import Dialect
from orchestrator.core.sse import DONE, openai_event, tgi_event
from orchestrator.core.ticket import ShardView
from orchestrator.shards.script import Ask, Script, info, understood
from orchestrator.shards.script import Part as Part
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    PULLED_SUFFIX,
    Fingerprint,
    Limits,
    PullReply,
    PullRequest,
    Role,
    WaitReply,
)

FIRST_ID = 100
"""Token i of the script has the id FIRST_ID + i."""
PULLED_EPOCH = 77
"""Of every copy that a pull leaves."""


class Fault(StrEnum):
    """What happens instead of a token."""

    DIE = "die"
    """The connection breaks."""
    STOP = "stop"
    """The stream ends properly, too early."""
    ERROR_EVENT = "error_event"
    """TGI's error event, then the end."""
    GARBAGE = "garbage"
    """An event that is not JSON."""


@dataclass(slots=True)
class Gate:
    """Holds a shard at one point until it is opened."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def passed(self) -> None:
        self.reached.set()
        await self.opened.wait()


@dataclass(frozen=True, slots=True)
class Seen:
    """One request that reached the shard."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    connection: int
    """The other side's port: equal for requests on one connection."""


class _Died(Exception):
    pass


class FakeShard:
    """An ASGI application.  The script is the whole answer, one text a token."""

    def __init__(
        self,
        shard: str,
        role: Role,
        *,
        tokens: Iterable[str] = ("The", " capital", " is", " Paris", "."),
        end: str = "eos_token",
        limits: Limits | None = None,
    ) -> None:
        self.shard = shard
        self.role = role
        self.url = ""
        self.epoch = 7
        self.tokens = tuple(tokens)
        self.end = end
        self.prompt_tokens = 9
        self.echoes_model = False
        """Whether completions name the model that was asked for."""
        self.import_result = "hit"
        self.found = True
        self.refuses_wait = False
        self.arena_id = ""
        self.pull_port = 0
        self.pulls: str | None = None
        """What a pull comes to: `ok`, a miss reason, or `die`; None for a shard that fetches nothing."""
        self.first_id = FIRST_ID
        self.limits = limits or Limits(max_input_tokens=400, max_total_tokens=500)
        self.refuses: tuple[int, dict[str, str]] | None = None
        self.seen: list[Seen] = []
        self.left = asyncio.Event()
        """Somebody went away before the answer was complete."""
        self.idle = asyncio.Event()
        """Nobody is served now."""
        self.idle.set()
        self._running = 0
        self._gates: dict[tuple[Part, int] | str, Gate] = {}
        self._faults: dict[tuple[Part, int], Fault] = {}

    def hold(self, part: Part, token: int) -> Gate:
        """A closed gate before token number `token` (from 0); after the last one, before a stream's end."""
        return self._gates.setdefault((part, token), Gate())

    def hold_path(self, path: str) -> Gate:
        """A closed gate before the answer of a route that needs no model, by the start of its path."""
        return self._gates.setdefault(path, Gate())

    def heal(self) -> None:
        """Open every gate, break nothing."""
        for gate in self._gates.values():
            gate.opened.set()
        self._faults.clear()

    def fail(self, part: Part, token: int, fault: Fault) -> None:
        """Break before token number `token`."""
        self._faults[part, token] = fault

    def generations(self, part: Part | None = None) -> list[Seen]:
        """The generation requests that came, of one kind if `part` is given."""
        asked = [seen for seen in self.seen if "generate" in seen.path or "completions" in seen.path]
        return [seen for seen in asked if part is None or understood(seen.path, seen.body).part is part]

    def view(self, state: str = "ready") -> ShardView:
        """What the shard table says of it."""
        return ShardView(
            shard=self.shard,
            role=self.role,
            epoch=self.epoch,
            url=self.url,
            state=state,
            fingerprint=Fingerprint("fake", "1", "t", "float32", "float32", 1, 1, 8),
            limits=self.limits,
            kv_tokens=100_000,
            slots=64,
            ring_bytes=1 << 30,
            record_limit_bytes=1 << 28,
            bytes_per_token=64,
            arena_id=self.arena_id,
            pull_port=self.pull_port,
            pulls=self.pulls is not None,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        seen = await _received(scope, receive)
        self.seen.append(seen)
        answering = asyncio.create_task(self._answer(seen, send))
        leaving = asyncio.create_task(_gone(receive))
        self._running += 1
        self.idle.clear()
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            else:
                self.left.set()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._running -= 1
            if not self._running:
                self.idle.set()

    async def _answer(self, seen: Seen, send: Send) -> None:
        path = seen.path
        for start, gate in self._gates.items():
            if isinstance(start, str) and path.startswith(start):
                await gate.passed()
        if path.startswith("/kv/wait/") and self.refuses_wait:
            raise _Died
        if path.startswith("/kv/wait/"):
            await _json(send, self._wait_reply(path.rpartition("/")[2]).to_dict())
        elif path == "/kv/pull":
            await self._pull(PullRequest.from_dict(seen.body), send)
        elif path in ("/tokenize", "/chat_tokenize"):
            tokens = [{"id": 1, "text": "x", "start": 0, "stop": 1}] * self.prompt_tokens
            chat = {"tokenize_response": tokens, "templated_text": "x"}
            await _json(send, chat if path == "/chat_tokenize" else tokens)
        elif path == "/info":
            await _json(send, info(self.limits))
        elif self.refuses is not None:
            await _json(send, self.refuses[1], self.refuses[0])
        else:
            ask = understood(seen.path, seen.body)
            await (self._stream(ask, send) if ask.stream else self._whole(ask, send))

    def _wait_reply(self, handle: str) -> WaitReply:
        return WaitReply(
            protocol=PROTOCOL_VERSION,
            handle=handle,
            found=self.found,
            first_token_id=self.first_id if self.found else None,
            ended=self.found and len(self.tokens) == 1,
            prompt_tokens=self.prompt_tokens,
        )

    async def _pull(self, request: PullRequest, send: Send) -> None:
        if self.pulls == "die":
            raise _Died
        if self.pulls == "ok":
            where = (f"{self.shard}{PULLED_SUFFIX}", PULLED_EPOCH)
            reply = PullReply(PROTOCOL_VERSION, request.handle, True, *where, 64 * self.prompt_tokens)
        else:
            reply = PullReply(PROTOCOL_VERSION, request.handle, False, reason=self.pulls or "")
        await _json(send, reply.to_dict())

    async def _step(self, ask: Ask, token: int) -> Fault | None:
        """Before a token: wait at its gate, then say what breaks."""
        if (gate := self._gates.get((ask.part, token))) is not None:
            await gate.passed()
        fault = self._faults.get((ask.part, token))
        if fault is Fault.DIE:
            raise _Died
        return fault

    async def _stream(self, ask: Ask, send: Send) -> None:
        count = min(len(self.tokens), ask.max_new_tokens)
        script, openai = self._script(), ask.dialect is not Dialect.TGI
        encode = openai_event if openai else tgi_event
        fault = await self._step(ask, 0)
        headers = [(b"content-type", b"text/event-stream"), *self._import_header(ask)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(count):
            fault = fault if index == 0 else await self._step(ask, index)
            if fault is not None:
                broken = {Fault.ERROR_EVENT: encode(_failure(ask)), Fault.GARBAGE: b"data:{oops\n\n"}
                await _body(send, broken.get(fault, b""), more=False)
                return
            for prompt in range(ask.prompts):
                event = script.event(ask, index, last=index == count - 1, prompt=prompt)
                await _body(send, encode(event))
            # A server swallows what is sent to nobody: let the news arrive that nobody is there.
            await asyncio.sleep(0)
        await self._step(ask, count)
        if ask.dialect is Dialect.CHAT and ask.usage:
            await _body(send, encode(script.counted(ask, count)))
        await _body(send, DONE if openai else b"", more=False)

    async def _whole(self, ask: Ask, send: Send) -> None:
        count = min(len(self.tokens), ask.max_new_tokens)
        for index in range(count):
            await self._step(ask, index)
        counts = {b"x-generated-tokens": count, b"x-prompt-tokens": self.prompt_tokens}
        told = [(name, str(number * ask.prompts).encode()) for name, number in counts.items()]
        headers = [*self._import_header(ask), *told]
        await _json(send, self._script().whole(ask, count), headers=headers)

    def _script(self) -> Script:
        return Script(self.tokens, self.end, self.prompt_tokens, self.first_id, self.echoes_model)

    def _import_header(self, ask: Ask) -> list[tuple[bytes, bytes]]:
        told = ask.part is Part.GET and self.import_result
        return [(b"x-orchestrator-import", self.import_result.encode())] if told else []


def _failure(ask: Ask) -> dict[str, Any]:
    text = "Request failed during generation: out of memory"
    if ask.dialect is Dialect.TGI:
        return {"error": text, "error_type": "generation"}
    return {"error": {"message": text, "http_status_code": 422}}


async def _received(scope: Scope, receive: Receive) -> Seen:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    payload = orjson.loads(body) if body else {}
    return Seen(scope["method"], scope["path"], headers, payload, scope["client"][1])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(
    send: Send, payload: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = orjson.dumps(payload)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await _body(send, body, more=False)


async def _body(send: Send, piece: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})
