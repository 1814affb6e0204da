"""TGI's router as its sidecar sees it: asked in the background, so that no status call waits for it.

`/health` makes the router ask every rank, whose server answers between two steps: a slow answer is a long
prefill and no fault.  Only a refused connection, a bad answer or a long silence is.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace

from tgi_patches.contract import Limits
from tgi_patches.sidecar.describe import RouterView

ASK_EVERY_S = 1.0
DEADLINE_S = 5.0
SILENCE_S = 60.0
"""A router whose ranks did not answer `/health` for so long is taken for stuck."""
_ANSWER_BYTES = 1024 * 1024
_GAUGES = {
    "tgi_batch_current_size": "running",
    "tgi_queue_size": "waiting",
    "tgi_batch_current_max_tokens": "kv_tokens_used",
}
"""What TGI's `/metrics` calls them, and we.  The last counts what a batch may grow to: it is reserved."""
_GAUGE = re.compile(r"^(\w+)(?:\{.*\})? (\d+(?:\.\d+)?)\s*$", re.MULTILINE)
_LIMITS = (
    "max_input_tokens",
    "max_total_tokens",
    "max_best_of",
    "max_stop_sequences",
    "max_client_batch_size",
)


class RouterFault(Exception):
    """It does not serve; the text is a sentence."""


class Router:
    """At `host:port`; `limits` are those of the launch order, which the router's own take the place of."""

    def __init__(
        self,
        host: str,
        port: int,
        limits: Limits,
        *,
        ask_every_s: float = ASK_EVERY_S,
        deadline_s: float = DEADLINE_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = RouterView()
        self._address = (host, port)
        self._limits = limits
        self._ask_every_s = ask_every_s
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._clock = clock
        self._healthy_until_s = clock()

    async def watch(self) -> None:
        """Keeps `view` fresh; ends only by being cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self._ask_every_s)

    async def ask(self) -> None:
        """One round."""
        try:
            self.view = await self._asked(self.view)
        except RouterFault as fault:
            self.view = RouterView(str(fault))

    async def _asked(self, before: RouterView) -> RouterView:
        limits = before.limits
        if limits is None:  # of a router that has just started
            limits = limits_from(await self._get("/info"), self._limits)
        fault = await self._health()
        return RouterView(fault, limits, **gauges(await self._get("/metrics")))

    async def _health(self) -> str:
        """Empty while the last good answer is younger than `silence_s`."""
        try:
            await self._get("/health")
        except TimeoutError:
            stuck = self._clock() >= self._healthy_until_s
            return f"TGI's server has not answered for {self._silence_s:g} s." if stuck else ""
        self._healthy_until_s = self._clock() + self._silence_s
        return ""

    async def _get(self, path: str) -> bytes:
        """The body of a 200.  Raises RouterFault; TimeoutError for `/health` alone."""
        try:
            async with asyncio.timeout(self._deadline_s):
                status, body = await fetched(*self._address, path)
        except TimeoutError:
            if path == "/health":
                raise
            raise RouterFault(f"TGI's router did not answer {path} within {self._deadline_s:g} s.") from None
        except (OSError, ValueError) as error:
            raise RouterFault(f"TGI's router does not answer {path}: {error}.") from None
        if status != 200:
            raise RouterFault(f"TGI's router answers {path} with status {status}.")
        return body


async def fetched(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body of one GET.  HTTP/1.0: the answer ends with the connection and is never chunked."""
    reader, writer = await asyncio.open_connection(host, port, limit=_ANSWER_BYTES)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        await writer.drain()
        answer = bytearray()
        while len(answer) < _ANSWER_BYTES and (piece := await reader.read(_ANSWER_BYTES)):
            answer += piece
    finally:
        writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("that is no HTTP")
    return int(words[1]), body


def gauges(text: bytes) -> dict[str, int]:
    """By our names, what TGI's `/metrics` has counted so far."""
    found = _GAUGE.findall(text.decode(errors="replace"))
    return {_GAUGES[name]: int(float(value)) for name, value in found if name in _GAUGES}


def limits_from(info: bytes, ordered: Limits) -> Limits:
    """`ordered` with what the router itself enforces: a user's flags win over the launch order.

    Not its `max_concurrent_requests`, which is set above the number that the shard decodes at once.
    """
    try:
        told = json.loads(info)
    except ValueError:
        raise RouterFault("TGI's router answers /info with something that is not JSON.") from None
    if not isinstance(told, dict):
        raise RouterFault("TGI's router answers /info with something that is no object.")
    return replace(ordered, **{name: told[name] for name in _LIMITS if isinstance(told.get(name), int)})
