"""Asking a shard how it is: `GET /kv/status`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx

from orchestrator.errors import ShardError
from tgi_patches.contract import ContractError, StatusReply

StatusProbe = Callable[[str], Awaitable[StatusReply]]
"""Takes a shard's URL; raises ShardError for an answer that is none.  The caller sets the deadline."""


def http_probe(client: httpx.AsyncClient) -> StatusProbe:
    """A probe over HTTP; the client is the caller's to close."""

    async def probe(url: str) -> StatusReply:
        try:
            answer = await client.get(f"{url}/kv/status")
            answer.raise_for_status()
            return StatusReply.from_dict(answer.json())
        except (httpx.HTTPError, ContractError, ValueError, TypeError, AttributeError) as error:
            raise ShardError(f"The shard at {url} gives no status: {error}") from None

    return probe
