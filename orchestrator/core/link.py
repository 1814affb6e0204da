"""How a record gets from a prefill shard to a decode shard: in place, by a pull, or not at all.  Pure."""

from __future__ import annotations

from orchestrator.core.ticket import ShardView

_LOOPBACK = ("127.", "localhost", "[::1]")


def link(prefill: ShardView, decode: ShardView) -> str | None:
    """The address to pull from, empty for arenas that both shards map, None where there is no way.

    A shard that does not tell its arena is taken for one of the same host, as all were once.
    """
    if not prefill.arena_id or not decode.arena_id or prefill.arena_id == decode.arena_id:
        return ""
    if not prefill.pull_port or not decode.pulls:
        return None
    host = _pull_host(prefill)
    if host.startswith(_LOOPBACK) and not host_of(decode.url).startswith(_LOOPBACK):
        return None  # to the decode shard that address is its own host
    return f"{host}:{prefill.pull_port}"


def _pull_host(prefill: ShardView) -> str:
    """What it or its launcher names; its own loopback, told from elsewhere, is behind its URL's host."""
    host = host_of(prefill.url)
    named = prefill.pull_host
    elsewhere = named.startswith(_LOOPBACK) and not host.startswith(_LOOPBACK)
    return host if elsewhere else named or host


def host_of(url: str) -> str:
    """The host of an URL, in brackets where it is an IPv6 address."""
    where = url.partition("://")[2].partition("/")[0]
    bracketed, closing, _ = where.partition("]")
    return bracketed + closing if closing else where.partition(":")[0]
