"""Orders from one end to the other: a JSON object a line, signed with the key of this measurement."""

from __future__ import annotations

import json
import socket
from typing import Any, Self

from tgi_patches.key import sign, signed

ANSWER_LIMIT_S = 60.0


class Refused(Exception):
    """The other end could not do it; the text is its sentence."""


class Control:
    """The side that orders; blocking.  Raises OSError where nothing answers, Refused."""

    def __init__(self, address: str, key: bytes) -> None:
        self.host, _, port = address.rpartition(":")
        self._key = key
        self._sock = socket.create_connection((self.host, int(port)), ANSWER_LIMIT_S)
        self._lines = self._sock.makefile("rwb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._sock.close()

    @property
    def own_host(self) -> str:
        """Our address, as the other end sees it."""
        return str(self._sock.getsockname()[0])

    def order(self, do: str, **details: Any) -> dict[str, Any]:
        self._lines.write(order_line(self._key, {"do": do, **details}))
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise Refused("the other end has closed the connection")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise Refused(str(answer["refused"]))
        return answer


def order_line(key: bytes, order: dict[str, Any]) -> bytes:
    text = json.dumps(order)
    return json.dumps([text, sign(key, text)]).encode() + b"\n"


def order_of(key: bytes, line: bytes) -> dict[str, Any]:
    """Raises Refused for a line that is not signed with `key`."""
    try:
        text, signature = json.loads(line)
        if signed(key, signature, text):
            order: dict[str, Any] = json.loads(text)
            return order
    except (ValueError, TypeError, AttributeError):
        pass
    raise Refused("the order is not signed with this measurement's key")
