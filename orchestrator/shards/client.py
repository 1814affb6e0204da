"""How the gateway talks to shards: one HTTP client, a deadline on every step.

Whatever httpx raises becomes ShardLost or DeadlinePassed here and nowhere else; a shard's own
refusal (422, 424, 429) becomes ShardAnswered and reaches the client as the shard wrote it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from orchestrator.core.sse import BrokenStream, Event, Parser
from orchestrator.core.ticket import Leg
from orchestrator.errors import DeadlinePassed, GatewayError, Overloaded, ShardLost
from tgi_patches.contract import (
    ContractError,
    PullReply,
    PullRequest,
    StatusReply,
    WaitReply,
    checked_part,
)
from tgi_patches.key import sign

IMPORT_HEADER = "x-orchestrator-import"

_STATUS_OF = {
    "validation": 422,
    "template_error": 422,
    "missing_template_variable": 422,
    "tool_error": 422,
    "generation": 424,
    "overloaded": 429,
}
# TGI's chat stream says 422 whatever went wrong; only its sentence tells.
_TYPE_OF = {
    "Model is overloaded": "overloaded",
    "Request failed during generation": "generation",
    "Incomplete generation": "incomplete_generation",
    "Template error": "template_error",
    "Tool error": "tool_error",
}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds until a step of a shard counts as failed."""

    connect_s: float = 2.0
    first_event_s: float = 60.0
    """From a streaming request to its first event: a queue on the shard and a whole prefill."""
    idle_s: float = 30.0
    """Between two events.  Keep-alive comments do not count: a stuck engine sends them too."""
    control_s: float = 5.0
    """For an answer that needs no model."""
    pull_grace_s: float = 0.5
    """Beyond a pull's own deadline: its sidecar says why it failed, if it can."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A shard's whole answer with status 200."""

    shard: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The parsed body; ShardLost when it is no JSON."""
        with _translated(self.shard):
            return orjson.loads(self.body)


class ShardAnswered(GatewayError):
    """A shard's own refusal; status and body are the shard's."""

    def __init__(self, status: int, error: str, error_type: str, retry_after: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error_type = error_type
        self.retry_after = retry_after


class ShardStream:
    """The events of one leg, in order.  Raises ShardAnswered for an error event."""

    def __init__(self, shard: str, response: httpx.Response, deadlines: Deadlines) -> None:
        self.headers: Mapping[str, str] = response.headers
        self.shard = shard
        self._pieces: AsyncGenerator[bytes, None] = response.aiter_raw()  # type: ignore[assignment]
        self._parser = Parser()
        self._ready: deque[Event] = deque()
        self._patience_s = deadlines.first_event_s
        self._idle_s = deadlines.idle_s

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event that has data."""
        if not self._ready:
            with _translated(self.shard):
                async with asyncio.timeout(self._patience_s):
                    await self._fill()
        self._patience_s = self._idle_s
        event = self._ready.popleft()
        if event.data and b'"error"' in event.data:
            with _translated(self.shard):
                refusal = refusal_in(event.data)
            if refusal is not None:
                raise refusal
        return event

    async def _fill(self) -> None:
        while not self._ready:
            piece = await anext(self._pieces, None)
            events = self._parser.finish() if piece is None else self._parser.feed(piece)
            self._ready.extend(event for event in events if event.data is not None)
            if piece is None and not self._ready:
                raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._pieces.aclose()


class ShardClient:
    """Talks to every shard of a deployment.

    `key` is the deployment's, empty where it has none; `transport` is httpx's own unless given.
    """

    def __init__(
        self,
        deadlines: Deadlines | None = None,
        *,
        key: bytes = b"",
        connections: int = 1024,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self._key = key
        # Idle connections are dropped before a shard's server does it (5 s): no race for a stale one.
        limits = httpx.Limits(max_connections=connections, keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(
            transport=transport or httpx.AsyncHTTPTransport(limits=limits, trust_env=False),
            timeout=httpx.Timeout(None, connect=self.deadlines.connect_s, pool=self.deadlines.connect_s),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def post(
        self, leg: Leg, path: str, body: bytes, timeout_s: float, *, request_id: str = ""
    ) -> Answer:
        """A whole answer.  Raises ShardAnswered, ShardLost or DeadlinePassed."""
        return await self._whole("POST", leg, path, body, timeout_s, request_id)

    async def get(self, leg: Leg, path: str) -> Answer:
        """An answer that needs no model, within `control_s`."""
        return await self._whole("GET", leg, path, b"", self.deadlines.control_s, "")

    @asynccontextmanager
    async def stream(
        self, leg: Leg, path: str, body: bytes, *, request_id: str = ""
    ) -> AsyncIterator[ShardStream]:
        """The events of a streaming answer; leaving the block closes the connection.

        Entering waits for the answer's head.  Raises like `post`, here and while iterating.
        """
        request = self._http.build_request("POST", leg.url + path, content=body, headers=_headers(request_id))
        with _translated(leg.shard):
            async with asyncio.timeout(self.deadlines.first_event_s):
                response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                with _translated(leg.shard):
                    async with asyncio.timeout(self.deadlines.control_s):
                        await response.aread()
                raise refused(leg.shard, response)
            events = ShardStream(leg.shard, response, self.deadlines)
            try:
                yield events
            finally:
                await events.aclose()
        finally:
            await response.aclose()

    async def status(self, url: str) -> StatusReply:
        """What a shard says of itself."""
        leg = Leg(shard=url, epoch=0, url=url)
        answer = await self.get(leg, "/kv/status")
        with _translated(leg.shard):
            return StatusReply.from_dict(answer.json())

    async def wait(self, leg: Leg, handle: str, timeout_s: float) -> WaitReply:
        """What the put leg left behind, as soon as it is there; `found` is false after `timeout_s`."""
        path = f"/kv/wait/{handle}?timeout_s={timeout_s:g}"
        deadline_s = timeout_s + self.deadlines.control_s
        answer = await self._whole("GET", _sidecar(leg), path, b"", deadline_s, "")
        with _translated(leg.shard):
            return WaitReply.from_dict(answer.json())

    async def pull(self, leg: Leg, request: PullRequest) -> PullReply:
        """Ask a decode shard's sidecar to fetch a record; the request is signed here.

        `found` is false for what it could not fetch within `request.timeout_s`.
        """
        signed = dataclasses.replace(request, signature=sign(self._key, *request.signed()))
        body = orjson.dumps(signed.to_dict())
        deadline_s = request.timeout_s + self.deadlines.pull_grace_s
        answer = await self._whole("POST", _sidecar(leg), "/kv/pull", body, deadline_s, "")
        with _translated(leg.shard):
            reply = PullReply.from_dict(answer.json())
            if reply.found:
                checked_part(reply.shard, "shard name")
            return reply

    async def _whole(
        self, method: str, leg: Leg, path: str, body: bytes, timeout_s: float, request_id: str
    ) -> Answer:
        with _translated(leg.shard):
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(
                    method, leg.url + path, content=body, headers=_headers(request_id)
                )
        if response.status_code != 200:
            raise refused(leg.shard, response)
        return Answer(leg.shard, response.headers, response.content)


def _sidecar(leg: Leg) -> Leg:
    return dataclasses.replace(leg, url=leg.control_url)


def payload_of(shard: str, event: Event) -> dict[str, Any]:
    """An event's JSON object, empty for `[DONE]`; ShardLost when it is neither."""
    if event.data is None or event.data == b"[DONE]":
        return {}
    with _translated(shard):
        payload = orjson.loads(event.data)
    if not isinstance(payload, dict):
        raise ShardLost(f"Shard {shard} sent an event that is not an object.")
    return payload


def refusal_in(data: bytes) -> ShardAnswered | None:
    """The error that an event carries, in either dialect; None for any other event."""
    payload = orjson.loads(data)
    error = payload.get("error") if isinstance(payload, dict) else None
    if error is None:
        return None
    if isinstance(error, dict):
        message = str(error.get("message", ""))
        error_type = next(
            (name for start, name in _TYPE_OF.items() if message.startswith(start)), "validation"
        )
    else:
        message = str(error)
        error_type = str(payload.get("error_type", "generation"))
    return ShardAnswered(_STATUS_OF.get(error_type, 500), message, error_type)


def refused(shard: str, response: httpx.Response) -> GatewayError:
    """The error for an answer that is not 200: passed on when it is about the request."""
    status = response.status_code
    try:
        payload = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        payload = None
    shaped = isinstance(payload, dict) and isinstance(payload.get("error"), str)
    if not shaped and not 400 <= status < 500:
        return ShardLost(f"Shard {shard} answered with status {status}.")
    error = payload["error"] if shaped else response.text[:200] or f"Shard {shard} answered {status}."
    error_type = payload.get("error_type") if shaped else None
    if status >= 500 and error_type != "incomplete_generation":
        return ShardLost(f"Shard {shard} answered with status {status}: {error}")
    return ShardAnswered(status, error, error_type or _type_of(status), response.headers.get("retry-after"))


def _type_of(status: int) -> str:
    return {422: "validation", 413: "validation", 429: "overloaded"}.get(status, "generation")


def _headers(request_id: str) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers | {"x-request-id": request_id} if request_id else headers


@contextmanager
def _translated(shard: str) -> Iterator[None]:
    try:
        yield
    except httpx.PoolTimeout:
        raise Overloaded("Model is overloaded") from None
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise ShardLost(f"Shard {shard} cannot be reached.") from None
    except (httpx.TimeoutException, TimeoutError):
        raise DeadlinePassed(f"Shard {shard} did not answer in time.") from None
    except httpx.HTTPError:
        raise ShardLost(f"Shard {shard} went away.") from None
    except (orjson.JSONDecodeError, BrokenStream, ContractError) as error:
        raise ShardLost(f"Shard {shard} sent an answer that cannot be read: {error}") from None
