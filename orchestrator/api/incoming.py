"""From an HTTP request to a job: the body within its limit, who asks, how the answer is wanted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from orchestrator.access import Visit
from orchestrator.api.gateway import Gateway
from orchestrator.api.stepping import promptly
from orchestrator.core.redress import Dialect, client_tag
from orchestrator.core.ticket import Choice
from orchestrator.errors import BodyTooSlow, InvalidRequest, TooLarge
from orchestrator.run import free

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TIMEOUT = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")
TIMEOUT_HEADER = b"x-orchestrator-timeout-s"
CHOICE_HEADER = b"x-orchestrator-choice"
_CHOICES = {choice.encode(): choice for choice in Choice}


class ClientLeft(Exception):
    """The connection ended before the request did."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class Caller:
    """What the headers say."""

    request_id: str
    debug: bool = False
    """Asks for the phases of its request."""
    key_name: str = ""
    """Of the API key that was shown."""
    priority: int = 0
    timeout_s: float | None = None
    choice: Choice | None = None
    """How the request is to be served; None leaves it to the deployment."""
    charge: Callable[[int], None] = free
    """To be told the request's tokens, prompt and answer, when it is over."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Caller:
        """Of a request that generates nothing; its id has passed `request_id_of`."""
        return cls(headers.get("x-request-id", ""))


def caller_of(headers: Mapping[bytes, bytes], visit: Visit, request_id: str) -> Caller:
    """Of a request that generates.  InvalidRequest for a timeout or a choice that is none."""
    return Caller(
        request_id=request_id,
        debug=headers.get(b"x-orchestrator-debug") == b"1",
        key_name=visit.key_name,
        priority=visit.priority,
        timeout_s=_timeout_s(headers[TIMEOUT_HEADER]) if TIMEOUT_HEADER in headers else None,
        choice=_choice(headers[CHOICE_HEADER]) if CHOICE_HEADER in headers else None,
        charge=visit.leave,
    )


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The caller's own where it is safe in a log and in a header, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _timeout_s(given: bytes) -> float:
    if not _TIMEOUT.fullmatch(given) or float(given) <= 0:
        raise InvalidRequest(
            f"The header {TIMEOUT_HEADER.decode()} must be a number of seconds above 0, such as 2.5."
        )
    return float(given)


def _choice(given: bytes) -> Choice:
    choice = _CHOICES.get(given)
    if choice is None:
        raise InvalidRequest(f"The header {CHOICE_HEADER.decode()} must be {' or '.join(Choice)}.")
    return choice


async def body_of(
    receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int, within_s: float
) -> bytes:
    """The body.  Raises ClientLeft, BodyTooSlow, and TooLarge as soon as the limit is passed."""
    try:
        return await promptly(_read(receive, headers, limit_bytes), within_s)
    except TimeoutError:
        raise BodyTooSlow(f"The request's body did not come within {within_s:g} s.") from None


async def _read(receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    told = headers.get(b"content-length", b"")
    if told.isdigit() and int(told) > limit_bytes:
        raise _too_large(limit_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_body(request: Request, gateway: Gateway) -> bytes:
    """The same for a route of FastAPI's."""
    headers = dict(request.scope["headers"])
    return await body_of(request.receive, headers, gateway.payload_bytes, gateway.body_timeout_s)


def refuse_tags(dialect: Dialect, raw: dict[str, Any]) -> None:
    """Only the gateway may send a KV handle to a shard."""
    if client_tag(dialect, raw) is not None:
        field = "adapter_id" if dialect is Dialect.TGI else "model"
        raise InvalidRequest(f"Input validation error: `{field}` must not contain `|kv`")


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {limit_bytes} bytes.")
