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

from orchestrator.core.sse import DONE, openai_event, tgi_event
from orchestrator.core.ticket import ShardView
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    PULLED_SUFFIX,
    Fingerprint,
    GetTag,
    Limits,
    PullReply,
    PullRequest,
    PutTag,
    Role,
    WaitReply,
    parse_tag,
)

FIRST_ID = 100
"""Token i of the script has the id FIRST_ID + i."""
PULLED_EPOCH = 77
"""Of every copy that a pull leaves."""


class Part(StrEnum):
    """What a request to a shard is."""

    PUT = "put"
    GET = "get"
    PLAIN = "plain"


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


@dataclass(frozen=True, slots=True)
class _Ask:
    """A generation request, understood."""

    chat: bool
    stream: bool
    part: Part
    model: str
    max_new_tokens: int
    details: bool
    usage: bool
    seed: int | None


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
        asked = [seen for seen in self.seen if "generate" in seen.path or "chat/completions" in seen.path]
        return [seen for seen in asked if part is None or _understood(seen).part is part]

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
            await _json(send, {"model_id": "fake", "max_input_tokens": self.limits.max_input_tokens})
        elif self.refuses is not None:
            await _json(send, self.refuses[1], self.refuses[0])
        else:
            ask = _understood(seen)
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

    async def _step(self, ask: _Ask, token: int) -> Fault | None:
        """Before a token: wait at its gate, then say what breaks."""
        if (gate := self._gates.get((ask.part, token))) is not None:
            await gate.passed()
        fault = self._faults.get((ask.part, token))
        if fault is Fault.DIE:
            raise _Died
        return fault

    async def _stream(self, ask: _Ask, send: Send) -> None:
        count = min(len(self.tokens), ask.max_new_tokens)
        encode = openai_event if ask.chat else tgi_event
        fault = await self._step(ask, 0)
        headers = [(b"content-type", b"text/event-stream"), *self._import_header(ask)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(count):
            fault = fault if index == 0 else await self._step(ask, index)
            if fault is not None:
                broken = {Fault.ERROR_EVENT: encode(_failure(ask)), Fault.GARBAGE: b"data:{oops\n\n"}
                await _body(send, broken.get(fault, b""), more=False)
                return
            make = self._chunk if ask.chat else self._event
            await _body(send, encode(make(ask, index, index == count - 1)))
            # A server swallows what is sent to nobody: let the news arrive that nobody is there.
            await asyncio.sleep(0)
        await self._step(ask, count)
        if ask.chat and ask.usage:
            counted = {"choices": [], "usage": self._usage(count)}
            await _body(send, encode(self._chunk_frame(ask) | counted))
        await _body(send, DONE if ask.chat else b"", more=False)

    async def _whole(self, ask: _Ask, send: Send) -> None:
        count = min(len(self.tokens), ask.max_new_tokens)
        for index in range(count):
            await self._step(ask, index)
        headers = [*self._import_header(ask), (b"x-generated-tokens", str(count).encode())]
        headers.append((b"x-prompt-tokens", str(self.prompt_tokens).encode()))
        make = self._completion if ask.chat else self._response
        await _json(send, make(ask, count), headers=headers)

    def _import_header(self, ask: _Ask) -> list[tuple[bytes, bytes]]:
        told = ask.part is Part.GET and self.import_result
        return [(b"x-orchestrator-import", self.import_result.encode())] if told else []

    def _reason(self, ask: _Ask, count: int) -> str:
        reason = "length" if count < len(self.tokens) else self.end
        return "stop" if ask.chat and reason == "eos_token" else reason

    def _token(self, index: int) -> dict[str, Any]:
        text = self.tokens[index]
        return {"id": self.first_id + index, "text": text, "logprob": -0.5, "special": False}

    def _event(self, ask: _Ask, index: int, last: bool) -> dict[str, Any]:
        ended = {"finish_reason": self._reason(ask, index + 1), "generated_tokens": index + 1}
        details = ended | {"seed": ask.seed, "input_length": self.prompt_tokens}
        return {
            "index": index + 1,
            "token": self._token(index),
            "generated_text": "".join(self.tokens[: index + 1]) if last else None,
            "details": details if last and ask.details else None,
        }

    def _chunk_frame(self, ask: _Ask) -> dict[str, Any]:
        frame = {"object": "chat.completion.chunk", "id": "", "created": 1, "system_fingerprint": "fake"}
        return frame | {"model": ask.model, "usage": None}

    def _chunk(self, ask: _Ask, index: int, last: bool) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": self.tokens[index]},
            "logprobs": None,
            "finish_reason": self._reason(ask, index + 1) if last else None,
        }
        return self._chunk_frame(ask) | {"choices": [choice]}

    def _usage(self, count: int) -> dict[str, int]:
        total = self.prompt_tokens + count
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": count, "total_tokens": total}

    def _response(self, ask: _Ask, count: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"generated_text": "".join(self.tokens[:count])}
        if ask.details:
            listed = [self._token(index) for index in range(count)]
            ended = {"finish_reason": self._reason(ask, count), "generated_tokens": count}
            answer["details"] = ended | {"seed": ask.seed, "prefill": [], "tokens": listed}
        return answer

    def _completion(self, ask: _Ask, count: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self.tokens[:count])}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(ask, count)}
        frame = {"object": "chat.completion", "id": "", "created": 1, "system_fingerprint": "fake"}
        return frame | {"model": ask.model, "choices": [choice], "usage": self._usage(count)}


def _understood(seen: Seen) -> _Ask:
    chat = seen.path == "/v1/chat/completions"
    parameters = seen.body if chat else seen.body.get("parameters", {})
    tag = parse_tag(parameters.get("model" if chat else "adapter_id"))
    parts: dict[type, Part] = {PutTag: Part.PUT, GetTag: Part.GET}
    spellings = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    wanted = next((parameters[name] for name in spellings if name in parameters), None)
    return _Ask(
        chat=chat,
        stream=bool(seen.body.get("stream")) if chat else seen.path == "/generate_stream",
        part=parts.get(type(tag), Part.PLAIN),
        model=seen.body.get("model") or "fake",
        max_new_tokens=1000 if wanted is None else wanted,
        details=bool(parameters.get("details")),
        usage=bool(parameters.get("stream_options", {}).get("include_usage")),
        seed=parameters.get("seed"),
    )


def _failure(ask: _Ask) -> dict[str, Any]:
    text = "Request failed during generation: out of memory"
    if ask.chat:
        return {"error": {"message": text, "http_status_code": 422}}
    return {"error": text, "error_type": "generation"}


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
