"""TGI's gRPC service as an asyncio client; every call has a deadline.

Messages are made from the description that the installed server carries.  Its reflection cannot be
asked: the server's own interceptor awaits a stream and fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from orchestrator.errors import ConfigError, GenerationFailed, ShardError

PACKAGE = "generate.v3"
SERVICE = f"{PACKAGE}.TextGenerationService"
DEADLINES_S: Mapping[str, float] = {"Warmup": 900.0, "Prefill": 300.0, "Decode": 300.0}
"""A step ends or the server is stuck: it runs one at a time, so nothing else would be answered either."""
CONTROL_DEADLINE_S = 30.0
"""For what needs no model."""
DETAIL_CHARS = 300

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Another server at the same path must not inherit this one's broken connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_GONE = {
    grpc.StatusCode.UNAVAILABLE: "went away",
    grpc.StatusCode.CANCELLED: "is stopping",
    grpc.StatusCode.UNIMPLEMENTED: "does not know that call",
}


class Connection:
    """One server.  Raises GenerationFailed for a call that it refused, ShardError once it is gone."""

    def __init__(self, channel: grpc.aio.Channel, pool: DescriptorPool) -> None:
        self._channel = channel
        self._pool = pool
        self._calls = {
            method.name: channel.unary_unary(
                f"/{SERVICE}/{method.name}",
                request_serializer=_serialized,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            for method in pool.FindServiceByName(SERVICE).methods
        }
        self.message = cache(self._message)
        """`message("PrefillRequest")` is that message's class."""

    @classmethod
    async def open(cls, uds: Path, schema: bytes, *, deadline_s: float, rank: int = 0) -> Self:
        """Connect to one rank of a server that was started with `--uds-path UDS`.

        `schema` is what `schema.read_schema` read from the server's interpreter.
        Raises ShardError when nobody answers within `deadline_s`, ConfigError for another protocol.
        """
        pool = _pool_of(schema)
        channel = grpc.aio.insecure_channel(f"unix:{uds}-{rank}", options=_OPTIONS)
        try:
            async with asyncio.timeout(deadline_s):
                await channel.channel_ready()
        except TimeoutError:
            raise ShardError(f"TGI's server did not answer within {deadline_s:g} s.") from None
        else:
            opened, channel = cls(channel, pool), None
            return opened
        finally:
            if channel is not None:
                await channel.close()

    async def call(self, method: str, request: Any, *, deadline_s: float | None = None) -> Any:
        """The response; without `deadline_s` the method's own deadline holds."""
        response, _ = await self.call_with_metadata(method, request, deadline_s=deadline_s)
        return response

    async def call_with_metadata(
        self, method: str, request: Any, *, deadline_s: float | None = None
    ) -> tuple[Any, Mapping[str, str]]:
        """The response, and the text metadata that came after it."""
        limit_s = deadline_s or DEADLINES_S.get(method, CONTROL_DEADLINE_S)
        call = self._calls[method](request, timeout=limit_s)
        try:
            response = await call
            trailing = await call.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            raise _translated(method, error, limit_s) from None
        return response, {key: value for key, value in trailing if isinstance(value, str)}

    async def close(self) -> None:
        """Running calls are cancelled."""
        await self._channel.close()

    def _message(self, name: str) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _serialized(message: Any) -> bytes:
    """One request goes to several ranks, whose connections describe it each for themselves."""
    data: bytes = message.SerializeToString()
    return data


def _pool_of(schema: bytes) -> DescriptorPool:
    """A pool of its own, so that two servers of two versions can be described in one process."""
    pool = DescriptorPool()
    try:
        pool.AddSerializedFile(schema)
        pool.FindServiceByName(SERVICE)
    except (KeyError, TypeError):
        raise ConfigError(f"This TGI does not have the service {SERVICE}.") from None
    return pool


def _translated(method: str, error: grpc.aio.AioRpcError, limit_s: float) -> Exception:
    """A step that failed costs its requests, a server that is gone or stuck costs the shard."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ShardError(f"TGI's server did not finish {method} within {limit_s:g} s.")
    if code in _GONE:
        return ShardError(f"TGI's server {_GONE[code]} ({method}).")
    details = " ".join((error.details() or code.name).split())
    return GenerationFailed(details[:DETAIL_CHARS])
