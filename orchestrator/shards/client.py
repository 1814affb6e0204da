"""How the gateway talks to shards: one pool of connections, a deadline on every step.

Whatever the pool raises becomes ShardLost or DeadlinePassed here and nowhere else; a shard's own
refusal (422, 424, 429) becomes ShardAnswered and reaches the client as the shard wrote it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from orchestrator.core.passage import Passage
from orchestrator.core.sse import Event, Parser
from orchestrator.core.ticket import Leg
from orchestrator.errors import DeadlinePassed, GatewayError, Overloaded, ShardLost
from orchestrator.shards.http import (
    CannotConnect,
    Connection,
    ConnectionLost,
    HttpError,
    Origin,
    Pool,
    PoolFull,
    message,
)
from orchestrator.shards.relay import Push, Relay
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
Headers = Mapping[bytes, bytes]
"""As they came, names in lower case."""
KNOWN_ORIGINS = 1024
FAILURES = (HttpError, TimeoutError, ValueError, ContractError)
"""What an exchange with a shard may raise; `translated` knows each."""
T = TypeVar("T")

_HEADERS = (("content-type", "application/json"), ("accept-encoding", "identity"))

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


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Answer:
    """A shard's whole answer with status 200."""

    shard: str
    headers: Headers
    body: bytes

    def json(self) -> Any:
        """The parsed body; ShardLost when it is no JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise translated(self.shard, error) from None


class ShardAnswered(GatewayError):
    """A shard's own refusal; status and body are the shard's."""

    def __init__(self, status: int, error: str, error_type: str, retry_after: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error_type = error_type
        self.retry_after = retry_after


class ShardStream:
    """The events of one leg, in order: one by one first, then all the rest in one go.

    Raises ShardAnswered for an error event.
    """

    def __init__(self, shard: str, connection: Connection, deadlines: Deadlines) -> None:
        self.headers: Headers = connection.headers
        self.shard = shard
        self._connection = connection
        self._parser = Parser()
        self._ready: deque[Event] = deque()
        self._patience_s = deadlines.first_event_s
        self._idle_s = deadlines.idle_s

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event that has data."""
        if not self._ready:
            self._connection.expect(self._patience_s)
            try:
                await self._fill()
            except FAILURES as error:
                raise translated(self.shard, error) from None
        self._patience_s = self._idle_s
        event = self._ready.popleft()
        if event.data and b'"error"' in event.data:
            try:
                refusal = refusal_in(event.data)
            except ValueError as error:
                raise translated(self.shard, error) from None
            if refusal is not None:
                raise refusal
        return event

    async def _fill(self) -> None:
        while not self._ready:
            piece = await self._connection.piece()
            events = self._parser.feed(piece) if piece else self._parser.finish()
            self._ready.extend(event for event in events if event.data is not None)
            if not piece and not self._ready:
                raise StopAsyncIteration

    async def skip(self, within_s: float) -> None:
        """Read to the end without looking, so that the connection serves again."""
        self._connection.expect(within_s)
        try:
            await self._connection.rest()
        except FAILURES as error:
            raise translated(self.shard, error) from None

    async def relay(self, passage: Passage, push: Push) -> None:
        """Everything that is left, through `passage` into `push`, as it arrives."""
        unread = b"".join(event.raw for event in self._ready) + self._parser.rest()
        try:
            await Relay(self._connection, passage, push, self._idle_s).run(unread)
        except FAILURES as error:
            raise translated(self.shard, error) from None
        if passage.error_data is not None:
            refusal = refusal_in(passage.error_data)
            raise refusal or ShardLost(f"Shard {self.shard} sent an error that cannot be read.")


class _Streaming:
    """`async with`: the stream of one request; leaving the block gives the connection back."""

    __slots__ = ("_body", "_client", "_connection", "_leg", "_origin", "_path", "_request_id")

    def __init__(self, client: ShardClient, leg: Leg, path: str, body: bytes, request_id: str) -> None:
        self._client, self._leg = client, leg
        self._path, self._body, self._request_id = path, body, request_id
        self._origin: Origin | None = None
        self._connection: Connection | None = None

    async def __aenter__(self) -> ShardStream:
        try:
            return await self._begun(self._client.deadlines)
        except FAILURES as failure:
            self._leave()
            raise translated(self._leg.shard, failure) from None
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    async def _begun(self, deadlines: Deadlines) -> ShardStream:
        client, shard = self._client, self._leg.shard
        origin = self._origin = client.origin(self._leg.url)
        sent = message("POST", origin, self._path, self._body, _headers(self._request_id))
        self._body = b""  # not to be held as long as the stream
        connection = self._connection = await client.pool.send(
            origin, sent, connect_s=deadlines.connect_s, within_s=deadlines.first_event_s
        )
        if connection.status == 200:
            return ShardStream(shard, connection, deadlines)
        connection.expect(deadlines.control_s)
        body = await connection.rest()
        raise refused(shard, connection.status, connection.headers, body)

    def _leave(self) -> None:
        if self._connection is not None and self._origin is not None:
            self._client.pool.release(self._origin, self._connection)


class ShardClient:
    """Talks to every shard of a deployment; `key` is the deployment's, empty where it has none."""

    def __init__(
        self, deadlines: Deadlines | None = None, *, key: bytes = b"", pool: Pool | None = None
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self.pool = pool or Pool()
        self._key = key
        self._origins: dict[str, Origin] = {}

    async def aclose(self) -> None:
        await self.pool.aclose()

    async def post(
        self, leg: Leg, path: str, body: bytes, timeout_s: float, *, request_id: str = ""
    ) -> Answer:
        """A whole answer.  Raises ShardAnswered, ShardLost or DeadlinePassed."""
        return await self._whole("POST", leg, leg.url, path, body, timeout_s, request_id)

    async def get(self, leg: Leg, path: str) -> Answer:
        """An answer that needs no model, within `control_s`."""
        return await self._whole("GET", leg, leg.url, path, b"", self.deadlines.control_s, "")

    def stream(self, leg: Leg, path: str, body: bytes, *, request_id: str = "") -> _Streaming:
        """The events of a streaming answer; leaving the block closes what is not at its end.

        Entering waits for the answer's head.  Raises like `post`, here and while iterating.
        """
        return _Streaming(self, leg, path, body, request_id)

    async def status(self, url: str) -> StatusReply:
        """What a shard says of itself."""
        leg = Leg(shard=url, epoch=0, url=url)
        answer = await self.get(leg, "/kv/status")
        return _read(leg.shard, StatusReply.from_dict, answer)

    async def wait(self, leg: Leg, handle: str, timeout_s: float, *, request_id: str = "") -> WaitReply:
        """What the put leg left behind, as soon as it is there; `found` is false after `timeout_s`."""
        path = f"/kv/wait/{handle}?timeout_s={timeout_s:g}"
        deadline_s = timeout_s + self.deadlines.control_s
        answer = await self._whole("GET", leg, leg.control_url, path, b"", deadline_s, request_id)
        return _read(leg.shard, _wait_reply, answer)

    async def pull(self, leg: Leg, request: PullRequest, *, request_id: str = "") -> PullReply:
        """Ask a decode shard's sidecar to fetch a record; the request is signed here.

        `found` is false for what it could not fetch within `request.timeout_s`.
        """
        signed = dataclasses.replace(request, signature=sign(self._key, *request.signed()))
        body = orjson.dumps(signed.to_dict())
        deadline_s = request.timeout_s + self.deadlines.pull_grace_s
        answer = await self._whole("POST", leg, leg.control_url, "/kv/pull", body, deadline_s, request_id)
        return _read(leg.shard, _pull_reply, answer)

    async def _whole(
        self, method: str, leg: Leg, url: str, path: str, body: bytes, timeout_s: float, request_id: str
    ) -> Answer:
        try:
            origin = self.origin(url)
            sent = message(method, origin, path, body, _headers(request_id))
            connect_s = min(timeout_s, self.deadlines.connect_s)
            connection = await self.pool.send(
                origin, sent, connect_s=connect_s, within_s=timeout_s, whole=True
            )
        except FAILURES as error:
            raise translated(leg.shard, error) from None
        answer = Answer(leg.shard, connection.headers, connection.take())
        status = connection.status
        self.pool.release(origin, connection)
        if status != 200:
            raise refused(leg.shard, status, answer.headers, answer.body)
        return answer

    def origin(self, url: str) -> Origin:
        """ValueError for what is no shard's address."""
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) > KNOWN_ORIGINS:
                self._origins.clear()
            origin = self._origins[url] = Origin.of(url)
        return origin


def _wait_reply(raw: Any) -> WaitReply:
    try:
        return WaitReply(**raw)  # asked for with every request
    except TypeError:
        return WaitReply.from_dict(raw)


def _pull_reply(raw: Any) -> PullReply:
    reply = PullReply.from_dict(raw)
    if reply.found:
        checked_part(reply.shard, "shard name")
    return reply


def _read(shard: str, parse: Callable[[Any], T], answer: Answer) -> T:
    try:
        return parse(answer.json())
    except ContractError as error:
        raise translated(shard, error) from None


def payload_of(shard: str, event: Event) -> dict[str, Any]:
    """An event's JSON object, empty for `[DONE]`; ShardLost when it is neither."""
    if event.data is None or event.data == b"[DONE]":
        return {}
    try:
        payload = orjson.loads(event.data)
    except orjson.JSONDecodeError as error:
        raise translated(shard, error) from None
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


def refused(shard: str, status: int, headers: Headers, body: bytes) -> GatewayError:
    """The error for an answer that is not 200: passed on when it is about the request."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        payload = None
    shaped = isinstance(payload, dict) and isinstance(payload.get("error"), str)
    if not shaped and not 400 <= status < 500:
        return ShardLost(f"Shard {shard} answered with status {status}.")
    text = body[:800].decode("utf-8", "replace")[:200]
    error = payload["error"] if shaped else text or f"Shard {shard} answered {status}."
    error_type = payload.get("error_type") if shaped else None
    if status >= 500 and error_type != "incomplete_generation":
        return ShardLost(f"Shard {shard} answered with status {status}: {error}")
    retry_after = headers.get(b"retry-after")
    told = None if retry_after is None else retry_after.decode("latin-1")
    return ShardAnswered(status, error, error_type or _type_of(status), told)


def _type_of(status: int) -> str:
    return {422: "validation", 413: "validation", 429: "overloaded"}.get(status, "generation")


def _headers(request_id: str) -> tuple[tuple[str, str], ...]:
    return (*_HEADERS, ("x-request-id", request_id)) if request_id else _HEADERS


def translated(shard: str, error: Exception) -> GatewayError:
    """What a failure on the way to a shard means for a client."""
    if isinstance(error, PoolFull):
        return Overloaded("Model is overloaded")
    if isinstance(error, CannotConnect):
        return ShardLost(f"Shard {shard} cannot be reached.")
    if isinstance(error, TimeoutError):
        return DeadlinePassed(f"Shard {shard} did not answer in time.")
    if isinstance(error, ConnectionLost):
        return ShardLost(f"Shard {shard} went away.")
    return ShardLost(f"Shard {shard} sent an answer that cannot be read: {error}")
