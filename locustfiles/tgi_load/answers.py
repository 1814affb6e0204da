"""What an event of a stream says, on TGI's own routes and on `/v1/chat/completions`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"
OVERLOADED = "overloaded"
TEXT_LIMIT = 120


@dataclass(frozen=True, slots=True)
class Fault:
    """A request that ended with an error."""

    status: int
    """HTTP status; 200 for an error inside a stream, 0 when there was no answer."""
    error_type: str
    """TGI's `error_type`, or what kind of fault it was."""
    text: str = ""

    @property
    def refused(self) -> bool:
        """True when the server had no room: 429, or TGI's `overloaded` inside a stream."""
        return self.status == 429 or self.error_type == OVERLOADED

    def __str__(self) -> str:
        """One line that is the same for faults of a kind: numbers are left out."""
        text = re.sub(r"\d+", "N", " ".join(self.text.split()))[:TEXT_LIMIT]
        return " ".join(part for part in (str(self.status or ""), self.error_type) if part) + (
            f": {text}" if text else ""
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """One event."""

    text: str = ""
    tokens: int = 0
    """Generated tokens in it."""
    last: bool = False
    """True for the event that ends a whole answer."""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    """The server's own count for the whole answer, where it tells."""
    fault: Fault | None = None


Reader = Callable[[str], Piece]


def read_tgi(data: str) -> Piece:
    """An event of `/generate_stream`.  Raises ValueError for anything else."""
    event = _object(data)
    if "error" in event:
        return Piece(fault=_fault(200, event))
    token, details = event["token"], event.get("details") or {}
    return Piece(
        # A special token, such as the end of the text, is generated and not shown.
        text="" if token.get("special") else token["text"],
        tokens=1,
        last=event.get("generated_text") is not None,
        prompt_tokens=details.get("input_length"),
        generated_tokens=details.get("generated_tokens"),
    )


def read_chat(data: str) -> Piece:
    """An event of `/v1/chat/completions`.  Raises ValueError for anything else."""
    if data == DONE:
        return Piece(last=True)
    event = _object(data)
    if "error" in event:
        return Piece(fault=_fault(200, event))
    choices, usage = event["choices"], event.get("usage") or {}
    text = (choices[0]["delta"].get("content") or "") if choices else ""
    return Piece(
        text=text,
        tokens=1 if text else 0,
        prompt_tokens=usage.get("prompt_tokens"),
        generated_tokens=usage.get("completion_tokens"),
    )


def read_error(status: int, body: bytes) -> Fault:
    """The error of an answer that is no stream; `body` is TGI's, OpenAI's or anything."""
    try:
        return _fault(status, _object(body.decode("utf-8", "replace")))
    except ValueError:
        return Fault(status, "http", body[:TEXT_LIMIT].decode("utf-8", "replace"))


def _object(data: str) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("An event that is no object.")
    return value


def _fault(status: int, event: Mapping[str, Any]) -> Fault:
    error = event.get("error")
    inner = error if isinstance(error, dict) else {}
    code = inner.get("http_status_code") or inner.get("code")
    status = code if status == 200 and isinstance(code, int) else status
    error_type = event.get("error_type") or inner.get("error_type") or inner.get("type") or "http"
    return Fault(status, str(error_type), str(inner.get("message") or error or ""))
