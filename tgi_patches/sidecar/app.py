"""The sidecar's HTTP: four routes, a bare ASGI application, no framework in TGI's container."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

from tgi_patches.contract import ContractError, PullReply, PullRequest, checked_handle
from tgi_patches.sidecar.core import WAIT_LIMIT_S, Sidecar

T = TypeVar("T")
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Event, Receive, Send], Awaitable[None]]

BODY_LIMIT_BYTES = 16 * 1024
WAIT_DEFAULT_S = 5.0
_METHODS = {"/kv/status": "GET", "/kv/pull": "POST", "/health": "GET"}
_WAIT = "/kv/wait/"


class Pulls(Protocol):
    """Fetches records from other hosts."""

    async def pull(self, request: PullRequest) -> PullReply:
        """Never raises but for cancellation."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: dict[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Refused(Exception):
    """The request cannot be answered; the text is one sentence."""

    def __init__(self, status: int, error_type: str, sentence: str, allow: str = "") -> None:
        super().__init__(sentence)
        headers = ((b"allow", allow.encode()),) if allow else ()
        self.answer = Answer(status, {"error": sentence, "error_type": error_type}, headers)


class ClientLeft(Exception):
    """Nobody waits for an answer any more."""


def create_app(sidecar: Sidecar, pulls: Pulls, unhealthy: Callable[[], str]) -> App:
    """`unhealthy` is asked at every `/health`: a sentence, or nothing where all is well."""
    routes = _Routes(sidecar, pulls, unhealthy)

    async def app(scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"A sidecar speaks HTTP, not {scope['type']}.")
        try:
            answer = await routes(scope, receive)
        except Refused as refused:
            answer = refused.answer
        except ClientLeft:
            return
        await _send(answer, send)

    return app


class _Routes:
    def __init__(self, sidecar: Sidecar, pulls: Pulls, unhealthy: Callable[[], str]) -> None:
        self._sidecar = sidecar
        self._pulls = pulls
        self._unhealthy = unhealthy

    async def __call__(self, scope: Event, receive: Receive) -> Answer:
        path = scope["path"]
        _check_method(path, scope["method"])
        if path == "/kv/status":
            return Answer(200, self._sidecar.status().to_dict())
        if path == "/kv/pull":
            request = pull_request(await _body(receive))
            return Answer(200, (await _unless_left(receive, self._pulls.pull(request))).to_dict())
        if path == "/health":
            return self._health()
        handle, timeout_s = wait_arguments(path.removeprefix(_WAIT), scope["query_string"])
        return Answer(200, (await _unless_left(receive, self._sidecar.wait(handle, timeout_s))).to_dict())

    def _health(self) -> Answer:
        if sentence := self._unhealthy():
            raise Refused(503, "unhealthy", sentence)
        return Answer(200, {"status": "ok"})


def wait_arguments(handle: str, query: bytes) -> tuple[str, float]:
    """(handle, seconds within the limit).  Raises Refused."""
    asked = parse_qs(query.decode(errors="replace")).get("timeout_s", [str(WAIT_DEFAULT_S)])[-1]
    try:
        timeout_s = float(asked)
        if timeout_s != timeout_s:
            raise ValueError
    except ValueError:
        raise Refused(422, "validation", f"`timeout_s` must be a number of seconds, not {asked!r}.") from None
    try:
        return checked_handle(handle), min(max(timeout_s, 0.0), WAIT_LIMIT_S)
    except ContractError as error:
        raise Refused(422, "validation", str(error)) from None


def pull_request(body: bytes) -> PullRequest:
    """The message of a body.  Raises Refused."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "validation", "The body of a pull must be JSON.") from None
    if not isinstance(raw, dict):
        raise Refused(400, "validation", "The body of a pull must be a JSON object.")
    try:
        request = PullRequest.from_dict(raw)
    except ContractError as error:
        raise Refused(400, "validation", str(error)) from None
    if fault := _fault(request):
        raise Refused(400, "validation", fault)
    return request


def _fault(request: PullRequest) -> str:
    """JSON does not know the types of a message."""
    texts = (request.address, request.signature)
    timeout_s = request.timeout_s
    if not all(isinstance(text, str) for text in texts):
        return "The address and the signature of a pull must be strings."
    if not isinstance(request.epoch, int) or isinstance(request.epoch, bool):
        return "The epoch of a pull must be an integer."
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        return "`timeout_s` of a pull must be a positive number of seconds."
    return ""


def _check_method(path: str, method: str) -> None:
    known = "GET" if path.startswith(_WAIT) else _METHODS.get(path)
    if known is None:
        raise Refused(404, "not_found", "A sidecar has /kv/status, /kv/wait/{handle}, /kv/pull and /health.")
    if method != known:
        raise Refused(405, "not_allowed", f"{path} takes {known} and not {method}.", allow=known)


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        body += event.get("body", b"")
        if len(body) > BODY_LIMIT_BYTES:
            raise Refused(413, "too_large", f"The body of a pull is larger than {BODY_LIMIT_BYTES} bytes.")
        if not event.get("more_body", False):
            return bytes(body)


async def _unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for future in (task, left):
            future.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(answer: Answer, send: Send) -> None:
    body = json.dumps(answer.content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": answer.status, "headers": [*headers, *answer.headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
