"""TGI's HTTP surface over one model, and the verbs of the sidecar on the same port."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from orchestrator.api import answers, sse
from orchestrator.api.schemas import ChatRequest, CompletionRequest, GenerateBody, parse_body
from orchestrator.core.validation import invalid
from orchestrator.errors import GatewayError, GenerationFailed, ShardError, TooLarge
from tgi_patches.contract import PullRequest, checked_handle
from tgi_patches.sidecar import Sidecar

from . import wire
from .access import Origin
from .chat import Chat, asked_of
from .completions import Completions
from .loop import Timing
from .metrics import exposition
from .service import Service

if TYPE_CHECKING:
    from orchestrator.embedded.pulls import Pulls

log = structlog.get_logger(__name__)
T = TypeVar("T")
Events = AsyncGenerator[tuple[bytes, str]]
"""Encoded events, each with the import result that it tells of (empty but for the first)."""
Handler = Callable[[Request], Awaitable[Response]]
Run = Callable[[], Coroutine[Any, Any, None]]
"""Serves requests until it is cancelled; ends by itself, or raises, when it can serve no more."""

_WAIT_LIMIT_S = 60.0
_IMPORT_HEADER = "x-orchestrator-import"
_STREAM_HEADERS = {"x-accel-buffering": "no", "cache-control": "no-cache"}


class ShardServer:
    """Routes as methods; `create_app` mounts them.  `run` is the loop's own unless more must run with it."""

    def __init__(
        self, service: Service, sidecar: Sidecar, info: answers.Info, run: Run | None = None
    ) -> None:
        self.service = service
        self.sidecar = sidecar
        self.run = run or service.loop.run
        self.pulls: Pulls | None = None
        """Its links to other hosts; None for a shard without any."""
        self.failure: BaseException | None = None
        """Why the shard can serve no more."""
        self._info = info

    async def warmup(self) -> None:
        await self.service.loop.warmup()

    def run_ended(self, task: asyncio.Task[None]) -> None:
        """A shard without its loop would accept requests and never answer: end the process instead."""
        if task.cancelled():
            return
        self.failure = task.exception() or ShardError("The shard's loop ended.")
        log.critical("shard_broken", error=repr(self.failure))
        signal.raise_signal(signal.SIGTERM)

    # --- generation ---

    async def generate(self, request: Request) -> Response:
        received_s = time.monotonic()
        body, _ = parse_body(GenerateBody, await self._body(request))
        prepared = await self.service.prepare(body.to_request(), stream=False, origin=_origin(request))
        timing = Timing()
        best, *others = await _unless_left(request, self.service.answers(prepared, timing))
        prefill = wire.prefill_tokens(prepared, best, self.service.texts)
        content = wire.generate_response(prepared, best, others, prefix=_prefix(body), prefill=prefill)
        headers = wire.timing_headers(prepared, best, timing, received_s)
        headers |= _import_header(best.import_result)
        return Response(content.to_json(), media_type="application/json", headers=headers)

    async def generate_stream(self, request: Request) -> Response:
        body, _ = parse_body(GenerateBody, await self._body(request))
        prepared = await self.service.prepare(body.to_request(), stream=True, origin=_origin(request))
        prefix = _prefix(body)

        async def events() -> Events:
            index = 0
            async with aclosing(self.service.stream(prepared)) as steps:
                async for step in steps:
                    index += 1
                    event = wire.stream_event(prepared, index, step, prefix=prefix)
                    yield sse.tgi_event(event.model_dump()), step.import_result

        return await _streamed(request, events(), sse.tgi_event)

    async def chat(self, request: Request) -> Response:
        received_s = time.monotonic()
        body, _ = parse_body(ChatRequest, await self._body(request))
        asked = await Chat.of(body, self.service, _origin(request), self._info.model_id)
        if body.stream:
            return await _streamed(request, asked.events(self.service), sse.openai_event)
        timing = Timing()
        content, prepared, answer = await _unless_left(request, asked.whole(self.service, timing))
        headers = wire.timing_headers(prepared, answer, timing, received_s)
        headers |= _import_header(answer.import_result)
        return Response(content.to_json(), media_type="application/json", headers=headers)

    async def completions(self, request: Request) -> Response:
        body, _ = parse_body(CompletionRequest, await self._body(request))
        asked = await Completions.of(body, self.service, _origin(request), self._info.model_id)
        if body.stream:
            return await _streamed(request, asked.events(self.service), sse.openai_event)
        content = await _unless_left(request, asked.whole(self.service, Timing()))
        return Response(content.to_json(), media_type="application/json")

    # --- tokens ---

    async def tokenize(self, request: Request) -> Response:
        body, _ = parse_body(GenerateBody, await self._body(request))
        return JSONResponse([item.model_dump() for item in self._simple_tokens(body.inputs)])

    async def chat_tokenize(self, request: Request) -> Response:
        body, _ = parse_body(ChatRequest, await self._body(request))
        asked, _ = asked_of(body, self.service.templates)
        text = asked.inputs
        reply = answers.ChatTokenizeResponse(
            tokenize_response=self._simple_tokens(text, add_special_tokens=False), templated_text=text
        )
        return Response(reply.to_json(), media_type="application/json")

    def _simple_tokens(self, text: str, *, add_special_tokens: bool = True) -> list[answers.SimpleToken]:
        places = self.service.offsets(text, add_special_tokens=add_special_tokens)
        at_byte = list(accumulate((len(character.encode()) for character in text), initial=0))
        return [
            answers.SimpleToken(id=token_id, text=text[start:stop], start=at_byte[start], stop=at_byte[stop])
            for token_id, start, stop in places
        ]

    # --- state ---

    async def info(self, _: Request) -> Response:
        return Response(self._info.to_json(), media_type="application/json")

    async def health(self, _: Request) -> Response:
        return Response()

    async def metrics(self, _: Request) -> Response:
        return Response(exposition(self.sidecar.status()), media_type="text/plain; version=0.0.4")

    async def kv_status(self, _: Request) -> Response:
        status = self.sidecar.status()
        return JSONResponse((self.pulls.told(status) if self.pulls else status).to_dict())

    async def kv_wait(self, request: Request) -> Response:
        try:
            handle = checked_handle(request.path_params["handle"])
            timeout_s = float(request.query_params.get("timeout_s", "5"))
        except ValueError as error:
            raise invalid(str(error)) from None
        reply = await self.sidecar.wait(handle, min(max(timeout_s, 0.0), _WAIT_LIMIT_S))
        return JSONResponse(reply.to_dict())

    async def kv_pull(self, request: Request) -> Response:
        puller = self.pulls.puller if self.pulls else None
        if puller is None:
            raise HTTPException(404, "This shard fetches no records from other hosts.")
        try:
            asked = PullRequest.from_dict(json.loads(await self._body(request)))
        except ValueError as error:
            raise invalid(str(error)) from None
        reply = await _unless_left(request, puller.pull(asked))
        return JSONResponse(reply.to_dict())

    async def _body(self, request: Request) -> bytes:
        limit = self.service.limits.payload_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise TooLarge(f"The request body is larger than {limit} bytes.")
        return bytes(body)


def create_app(server: ShardServer) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(server.run())
        task.add_done_callback(server.run_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    posts: dict[str, Handler] = {
        "/generate": server.generate,
        "/generate_stream": server.generate_stream,
        "/v1/chat/completions": server.chat,
        "/v1/completions": server.completions,
        "/tokenize": server.tokenize,
        "/chat_tokenize": server.chat_tokenize,
        "/kv/pull": server.kv_pull,
    }
    gets: dict[str, Handler] = {
        "/info": server.info,
        "/health": server.health,
        "/metrics": server.metrics,
        "/kv/status": server.kv_status,
        "/kv/wait/{handle}": server.kv_wait,
    }
    for method, routes in (("POST", posts), ("GET", gets)):
        for path, handler in routes.items():
            app.add_route(path, handler, methods=[method])
    app.add_exception_handler(GatewayError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return JSONResponse(error.body(), status_code=error.status)


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail, "error_type": "not_found"}, status_code=error.status_code)


def _origin(request: Request) -> Origin:
    return Origin.of(request.url.path, request.headers.get("x-request-id", ""))


def _prefix(body: GenerateBody) -> str:
    parameters = body.parameters
    return body.inputs if parameters is not None and parameters.return_full_text else ""


def _import_header(result: str) -> dict[str, str]:
    return {_IMPORT_HEADER: result} if result else {}


async def _streamed(request: Request, events: Events, encode: Callable[[dict[str, str]], bytes]) -> Response:
    """Headers leave with the first token: an earlier error is a real status."""
    first, import_result = await _unless_left(request, anext(events))

    async def relayed() -> AsyncGenerator[bytes]:
        async with aclosing(events):
            yield first
            try:
                async for event, _ in events:
                    yield event
            except GatewayError as error:
                yield encode(error.body())

    headers = _STREAM_HEADERS | _import_header(import_result)
    return StreamingResponse(relayed(), media_type="text/event-stream", headers=headers)


async def _unless_left(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GenerationFailed("The client left.")
        return task.result()
    finally:
        for future in (task, left):
            future.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await request.receive())
