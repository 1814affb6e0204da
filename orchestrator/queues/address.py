"""Where a Redis is, how to reach it and what to say first: all that a Redis URL can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, TypeVar

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import RedisError

from orchestrator.errors import ConfigError

Command = tuple[str | int, ...]
P = TypeVar("P", bound=asyncio.Protocol)


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket's path, or a host and a port, with TLS or without."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: SSLContext | None = None
    hello: tuple[Command, ...] = field(default=(), repr=False)
    """Commands that come first: password, name, database."""

    @classmethod
    def of(cls, url: str) -> Address:
        """ConfigError for what redis-py, whose URLs these are, would not take."""
        try:
            made: Any = ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
            context = getattr(made, "ssl_context", None)
            tls = None if context is None else context.get()
        except (ValueError, TypeError, OSError, RedisError) as error:
            raise ConfigError(f"The Redis URL cannot be used: {error}") from None
        hello = _hello(made)
        if path := getattr(made, "path", ""):
            return cls(path=path, hello=hello)
        return cls(host=str(made.host), port=int(made.port), tls=tls, hello=hello)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        if self.path:
            return (await loop.create_unix_connection(protocol, self.path))[1]
        return (await loop.create_connection(protocol, self.host, self.port, ssl=self.tls))[1]


def _hello(made: Any) -> tuple[Command, ...]:
    hello: list[Command] = []
    if made.username:
        hello.append(("AUTH", made.username, made.password or ""))
    elif made.password:
        hello.append(("AUTH", made.password))
    if made.client_name:
        hello.append(("CLIENT", "SETNAME", made.client_name))
    if made.db:
        hello.append(("SELECT", int(made.db)))
    return tuple(hello)
