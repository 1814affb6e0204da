"""Offers one shard's records to the sidecars of other hosts that know the deployment's key."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from tgi_patches.bridge import Record
from tgi_patches.bridge.blocks import checksum
from tgi_patches.contract import BridgeMiss, ContractError, MissReason, check_protocol
from tgi_patches.pull import PullLimits, log
from tgi_patches.pull.chunks import Chunk, chunks
from tgi_patches.pull.proof import Session
from tgi_patches.pull.sockets import listening
from tgi_patches.pull.source import Offer, Source
from tgi_patches.pull.stream import Stream
from tgi_patches.pull.wire import (
    NONCE_BYTES,
    Described,
    Hello,
    Kind,
    Request,
    WireError,
    chunk_allowed,
    frame,
    pack_broken,
    pack_reason,
    pack_sums,
)

CONNECTIONS_MAX = 256
"""Open at a time, whether or not they have proved the key; further ones are closed at once."""
REQUEST_LIMIT_S = 600.0
ACCEPT_AGAIN_S = 0.1


class PullServer:
    """Serves `source`; where `key` is empty, to everyone who has none either."""

    def __init__(self, source: Source, key: bytes, limits: PullLimits = PullLimits()) -> None:  # noqa: B008 - frozen
        self._source = source
        self._key = key
        self._limits = limits
        self._turns = asyncio.Semaphore(limits.pulls_at_once)
        self._connections = 0
        self.counts: Counter[str] = Counter()
        """Fetches of one rank's record by result: `ok`, or a MissReason."""

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Yields the bound port (`port` 0: any); closes all connections and mappings at its end.

        Raises OSError where the address cannot be bound.
        """
        with await listening(host, port) as listener:
            accepting = asyncio.create_task(self._accept(listener))
            try:
                yield listener.getsockname()[1]
            finally:
                accepting.cancel()
                await asyncio.wait([accepting])
                self._source.close()

    async def _accept(self, listener: socket.socket) -> None:
        """For ever; once cancelled, no connection is left."""
        async with asyncio.TaskGroup() as connections:
            while True:
                try:
                    sock, address = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:  # the peer is gone already, or there are no descriptors left
                    log.warn("pull_accept_failed", error=str(error))
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                peer = str(address[0])
                if self._connections >= CONNECTIONS_MAX:
                    log.warn("pull_refused", peer=peer, fault="too many connections")
                    sock.close()
                    continue
                self._connections += 1
                connections.create_task(self._serve(sock, peer)).add_done_callback(self._gone)

    def _gone(self, _: asyncio.Task[None]) -> None:
        self._connections -= 1

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """One connection to its end, which concerns no other."""
        with sock:
            try:
                stream = Stream(sock, self._limits.step_s)
                session = await self._greet(stream)
                if session is not None:
                    await self._answer_all(stream, session)
            except (WireError, ContractError) as fault:
                log.warn("pull_refused", peer=peer, fault=str(fault))
            except (OSError, TimeoutError) as fault:
                log.info("pull_connection_lost", peer=peer, fault=str(fault) or type(fault).__name__)
            except Exception as error:  # noqa: BLE001 - one connection must not end the server
                log.warn("pull_server_failed", peer=peer, error=repr(error))

    async def _greet(self, stream: Stream) -> Session | None:
        """None where the other side only looked in.  Raises WireError, ContractError."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await stream.send(frame(Kind.WELCOME, Hello(nonce, bool(self._key)).pack()))
        greeting = await stream.frame(Kind.HELLO, within_s=self._limits.step_s)
        if greeting is None:
            return None
        hello = Hello.unpack(greeting[1])
        check_protocol(hello.version)
        if hello.keyed != bool(self._key):
            raise WireError("only one side has a key")
        return Session(self._key, hello.nonce, nonce)

    async def _answer_all(self, stream: Stream, session: Session) -> None:
        """Requests of one connection, one after another; each says how long the pull may still take."""
        idle_s = self._limits.step_s
        for number in count():
            asked = await stream.frame(Kind.DESCRIBE, Kind.FETCH, within_s=idle_s)
            if asked is None:
                return
            kind, payload = asked
            body = session.asked_for(payload, number, kind)
            request = Request.unpack(body)
            reply = _Reply(stream, session, number, body)
            idle_s = min(request.timeout_ms / 1000, REQUEST_LIMIT_S)
            async with asyncio.timeout(idle_s):
                await (self._describe if kind is Kind.DESCRIBE else self._fetch)(request, reply)

    async def _describe(self, request: Request, reply: _Reply) -> None:
        try:
            found = _described(self._find(request).record)
        except BridgeMiss as miss:
            await reply.miss(miss.reason)
        else:
            await reply.send(Kind.FOUND, found.pack())

    async def _fetch(self, request: Request, reply: _Reply) -> None:
        if not chunk_allowed(request.chunk_bytes):
            raise WireError("a fetch without a size of chunks")
        await self._turn(reply)
        try:
            reason = await self._send(request, reply)
            self.counts[reason or "ok"] += 1
        finally:
            self._turns.release()

    async def _turn(self, reply: _Reply) -> None:
        """Wait for it, and let the other side know meanwhile that nothing is broken."""
        while True:
            try:
                async with asyncio.timeout(self._limits.step_s / 4):
                    await self._turns.acquire()
                return
            except TimeoutError:
                await reply.send(Kind.BUSY)

    async def _send(self, request: Request, reply: _Reply) -> MissReason | None:
        """The data; None, or why not all of it was sent.  Raises WireError."""
        try:
            offer = self._find(request)
        except BridgeMiss as miss:
            await reply.miss(miss.reason)
            return miss.reason
        with offer.data:
            plan = chunks(_described(offer.record).plane_bytes, request.chunk_bytes)
            if request.start_chunk > len(plan):
                raise WireError("a fetch from behind the end")
            await reply.send(Kind.DATA)
            for chunk in plan[request.start_chunk :]:
                if reason := await _send_chunk(reply.stream, offer, chunk):
                    return reason
        return None

    def _find(self, request: Request) -> Offer:
        """Raises BridgeMiss."""
        if request.digest != self._source.digest:
            raise BridgeMiss(MissReason.FINGERPRINT, f"asked for {request.digest:016x}")
        if request.shard != self._source.shard:
            raise BridgeMiss(MissReason.MISSING, f"no records of {request.shard} here")
        offer = self._source.find(request.epoch, request.handle, request.rank)
        if request.sequence not in (0, offer.record.sequence):
            raise BridgeMiss(MissReason.OVERWRITTEN, "exported again")
        return offer


class _Reply:
    """To one request: frames that prove who answers."""

    def __init__(self, stream: Stream, session: Session, number: int, request: bytes) -> None:
        self.stream = stream
        self._session = session
        self._number = number
        self._request = request

    async def send(self, kind: Kind, body: bytes = b"") -> None:
        proof = self._session.answer(self._number, self._request, kind, body)
        await self.stream.send(frame(kind, body + proof))

    async def miss(self, reason: MissReason) -> None:
        await self.send(Kind.MISS, pack_reason(reason))


async def _send_chunk(stream: Stream, offer: Offer, chunk: Chunk) -> MissReason | None:
    """Its bytes, then what they must hash to, or why they may be wrong."""
    with offer.data[chunk.start : chunk.end] as data:
        await stream.send(data)
        known = offer.record.checksums[chunk.first_block :][: chunk.blocks]
        sums = known or _hashed(data, chunk)
    try:
        offer.check()
    except BridgeMiss as miss:
        await stream.send(pack_broken(miss.reason, chunk.blocks))
        return miss.reason
    await stream.send(pack_sums(sums))
    return None


def _hashed(data: memoryview, chunk: Chunk) -> tuple[int, ...]:
    """Of a record whose writer made no checksums."""
    starts = (chunk.start, *chunk.ends[:-1])
    pairs = zip(starts, chunk.ends, strict=True)
    return tuple([checksum(data[start - chunk.start : end - chunk.start]) for start, end in pairs])


def _described(record: Record) -> Described:
    return Described(record.sequence, record.token_ids, record.first, record.ended, record.rows, record.ranks)
