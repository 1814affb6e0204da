"""From an HTTP request to a job: the body within its limit, who asks, how the answer is wanted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from orchestrator.core.redress import Dialect, client_tag
from orchestrator.errors import InvalidRequest, TooLarge

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say."""

    request_id: str
    debug: bool = False
    """Asks for the phases of its request."""
    key_name: str = ""
    """Of the API key that was shown."""
    priority: int = 0
    timeout_s: float | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Caller:
        """Takes the caller's own request id where it is safe in a log, else mints one."""
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        return cls(request_id, headers.get("x-orchestrator-debug") == "1")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body.  Raises TooLarge as soon as the limit is passed, before reading on."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


def refuse_tags(dialect: Dialect, raw: dict[str, Any]) -> None:
    """Only the gateway may send a KV handle to a shard."""
    if client_tag(dialect, raw) is not None:
        field = "adapter_id" if dialect is Dialect.TGI else "model"
        raise InvalidRequest(f"Input validation error: `{field}` must not contain `|kv`")


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {limit_bytes} bytes.")
