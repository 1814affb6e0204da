"""A connection to another host's sidecar, as the puller sees it: describe, then fetch."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from tgi_patches.bridge import Reservation
from tgi_patches.bridge.blocks import checksum
from tgi_patches.contract import BridgeMiss, ContractError, MissReason, check_protocol
from tgi_patches.pull import PullLimits
from tgi_patches.pull.chunks import Chunk, chunks, pieces
from tgi_patches.pull.conversation import Conversation, Script
from tgi_patches.pull.proof import Session
from tgi_patches.pull.sockets import dialled
from tgi_patches.pull.wire import (
    FOUND_BYTES,
    HEADER,
    NONCE_BYTES,
    SMALL_BYTES,
    Described,
    Hello,
    Kind,
    Request,
    frame,
    parse_header,
    trailer_bytes,
    unpack_reason,
    unpack_trailer,
    unsealed,
)


@dataclass(slots=True)
class Receiving:
    """One rank's record while it arrives; another connection can go on where one broke."""

    found: Described
    chunk_bytes: int
    reservation: Reservation
    checksums: list[int] = field(default_factory=list)
    """Of the blocks that have been verified, in order."""
    verified: int = 0
    """Chunks."""
    plan: list[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = chunks(self.found.plane_bytes, self.chunk_bytes)


class Link:
    """Greeted, and only that: each answer has to prove the key."""

    def __init__(self, conversation: Conversation, session: Session) -> None:
        self._conversation = conversation
        self._session = session
        self._number = 0

    async def describe(self, request: Request) -> Described:
        """Raises BridgeMiss: the server's reason, or LINK."""
        return Described.unpack(await self._ask(Kind.DESCRIBE, request, Kind.FOUND))

    async def fetch(self, request: Request, into: Receiving) -> None:
        """Fill the reservation from the first chunk that is not verified.

        Raises BridgeMiss: OVERWRITTEN (here or there), EPOCH, CHECKSUM, LINK and the server's others.
        """
        where = replace(
            request,
            sequence=into.found.sequence,
            chunk_bytes=into.chunk_bytes,
            start_chunk=into.verified,
        )
        await self._ask(Kind.FETCH, where, Kind.DATA)
        await self._conversation.run(_receive(into), lambda: into.reservation.valid)

    async def _ask(self, kind: Kind, request: Request, due: Kind) -> bytes:
        """Send a request; the body of its answer, which is `due`."""
        number, asked = self._number, request.pack()
        self._number += 1
        hello = (
            b"" if number else frame(Kind.HELLO, Hello(self._session.asked, bool(self._session.key)).pack())
        )
        sent = frame(kind, asked + self._session.request(number, kind, asked))
        await self._conversation.send(hello + sent)
        while True:
            script = read_frame(due, Kind.MISS, Kind.BUSY, limit_bytes=FOUND_BYTES)
            answer, payload = await self._conversation.run(script)
            body = self._session.answered_with(payload, number, asked, answer)
            if answer is Kind.MISS:
                raise BridgeMiss(unpack_reason(body), "said the other side")
            if answer is due:
                return body


@asynccontextmanager
async def connected(address: str, key: bytes, limits: PullLimits) -> AsyncIterator[Link]:
    """A link to `host:port`; closed, its socket too, at the end.

    Raises BridgeMiss: LINK, UNSUPPORTED (another protocol, or only one side has a key).
    """
    try:
        async with asyncio.timeout(limits.connect_s):
            sock = await dialled(address)
    except (OSError, ValueError, TimeoutError) as error:
        raise BridgeMiss(MissReason.LINK, f"no connection to {address}: {error}") from None
    conversation = Conversation(sock, limits.step_s)
    try:
        yield Link(conversation, await _greet(conversation, key))
    finally:
        conversation.close()


async def _greet(conversation: Conversation, key: bytes) -> Session:
    """The server speaks first, so that our greeting can go with the first request."""
    _, payload = await conversation.run(read_frame(Kind.WELCOME))
    hello = Hello.unpack(payload)
    try:
        check_protocol(hello.version)
    except ContractError as error:
        raise BridgeMiss(MissReason.UNSUPPORTED, str(error)) from None
    if hello.keyed != bool(key):
        raise BridgeMiss(MissReason.UNSUPPORTED, "only one side has a key")
    return Session(key, secrets.token_bytes(NONCE_BYTES), hello.nonce)


def read_frame(*kinds: Kind, limit_bytes: int = SMALL_BYTES) -> Script[tuple[Kind, bytes]]:
    """Kind and payload of the next frame.  Raises WireError."""
    raw = memoryview(bytearray(HEADER.size))
    yield raw
    header = parse_header(raw, *kinds, limit_bytes=limit_bytes)
    payload = memoryview(bytearray(header.payload_bytes))
    if header.payload_bytes:
        yield payload
    return header.kind, unsealed(header, payload)


def _receive(into: Receiving) -> Script[None]:
    """Data and what vouches for it, chunk by chunk.  Raises WireError, BridgeMiss."""
    for chunk in into.plan[into.verified :]:
        with into.reservation.data[chunk.start : chunk.end] as data:
            sums = yield from _fill(data, chunk)
        trailer = memoryview(bytearray(trailer_bytes(chunk.blocks)))
        yield trailer
        told = unpack_trailer(trailer, chunk.blocks)
        if isinstance(told, MissReason):
            raise BridgeMiss(told, "said the other side, on the way")
        if told != sums:
            raise BridgeMiss(MissReason.CHECKSUM, "data")
        into.checksums += sums
        into.verified += 1


def _fill(data: memoryview, chunk: Chunk) -> Script[tuple[int, ...]]:
    """The checksums of a chunk's blocks, each made where it arrived."""
    sums: list[int] = []
    base = chunk.start
    for start, end, ends in pieces(chunk):
        yield data[start - base : end - base]
        sums += _hashed(data, start - base, [edge - base for edge in ends])
    return tuple(sums)


def _hashed(data: memoryview, start: int, ends: list[int]) -> Iterator[int]:
    for end in ends:
        yield checksum(data[start:end])
        start = end
