"""The bytes between two sidecars.  Pure: nothing here reads, writes or waits.

A frame is a header of 16 bytes (kind, size of the payload, xxh3 of both) and its payload; only a
record's data travels without one, each chunk before the CHUNK that vouches for it.  Little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import PROTOCOL_VERSION, TOP_TOKENS_MAX, MissReason, checked_part
from tgi_patches.pull import CHUNK_MAX_BYTES, CHUNK_MIN_BYTES

NONCE_BYTES = 32
HEADER = struct.Struct("<IIQ")
SMALL_BYTES = 1024
"""No frame is larger, but for FOUND and CHUNK."""
FOUND_BYTES = 16 * 2**20
RANKS_MAX = 1024

_HELLO = struct.Struct(f"<8sHB5x{NONCE_BYTES}s")
_MAGIC = b"TGIPULL\0"
_REQUEST = struct.Struct("<16sQQQIIIHB")
_FOUND = struct.Struct("<QQIIIdHBB")
_TOP = struct.Struct("<Id")

_REASONS = (
    MissReason.ERROR,
    MissReason.MISSING,
    MissReason.OVERWRITTEN,
    MissReason.EPOCH,
    MissReason.FINGERPRINT,
    MissReason.CHECKSUM,
    MissReason.LAYOUT,
    MissReason.UNSUPPORTED,
    MissReason.LINK,
    MissReason.RANKS,
)
"""By the number that stands for them on the wire; what a peer does not know is an ERROR."""


class WireError(Exception):
    """What arrived is no frame of this protocol, or not the one that is due."""


class Kind(IntEnum):
    """Of frames."""

    HELLO = 1
    WELCOME = 2
    DESCRIBE = 3
    FETCH = 4
    FOUND = 5
    MISS = 6
    DATA = 7
    CHUNK = 8
    """Of the data in front of it: a checksum for each block."""
    BROKEN = 9
    """In its place: the record was lost while it was sent."""
    BUSY = 10
    """Nothing yet, and the connection stands."""


@dataclass(frozen=True, slots=True)
class Header:
    """Of a frame, checked for its size."""

    kind: Kind
    payload_bytes: int
    seal: int


def frame(kind: Kind, payload: bytes) -> bytes:
    """Header and payload."""
    return HEADER.pack(kind, len(payload), _seal(kind, payload)) + payload


def parse_header(raw: bytes | memoryview, *kinds: Kind, limit_bytes: int = SMALL_BYTES) -> Header:
    """Of a frame that may be one of `kinds`.  Raises WireError."""
    kind, payload_bytes, seal = HEADER.unpack(raw)
    if kind not in kinds:
        raise WireError(f"frame {kind} where {', '.join(k.name for k in kinds)} is due")
    if payload_bytes > limit_bytes:
        raise WireError(f"a frame of {payload_bytes} bytes, over {limit_bytes}")
    return Header(Kind(kind), payload_bytes, seal)


def unsealed(header: Header, payload: bytes | memoryview) -> bytes:
    """The payload as it was sent.  Raises WireError."""
    if header.seal != _seal(header.kind, payload):
        raise WireError(f"a damaged frame {header.kind.name}")
    return bytes(payload)


def _seal(kind: Kind, payload: bytes | memoryview) -> int:
    return xxh3_64_intdigest(payload, kind << 32 | len(payload))


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each side: HELLO and WELCOME."""

    nonce: bytes
    keyed: bool
    version: int = PROTOCOL_VERSION

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.version, self.keyed, self.nonce)

    @classmethod
    def unpack(cls, raw: bytes) -> Hello:
        if len(raw) != _HELLO.size or not raw.startswith(_MAGIC):
            raise WireError("a greeting of something else")
        _, version, keyed, nonce = _HELLO.unpack(raw)
        return cls(nonce, bool(keyed), version)


@dataclass(frozen=True, slots=True)
class Request:
    """DESCRIBE and FETCH: which record, and for FETCH the parts of it."""

    handle: str
    shard: str
    epoch: int
    rank: int
    digest: int
    """Of the puller's fingerprint."""
    timeout_ms: int
    sequence: int = 0
    """Of the record that was described."""
    chunk_bytes: int = 0
    start_chunk: int = 0

    def pack(self) -> bytes:
        shard = self.shard.encode()
        numbers = (self.epoch, self.digest, self.sequence, self.timeout_ms, self.chunk_bytes)
        handle = bytes.fromhex(self.handle)
        return _REQUEST.pack(handle, *numbers, self.start_chunk, self.rank, len(shard)) + shard

    @classmethod
    def unpack(cls, raw: bytes) -> Request:
        """Raises WireError."""
        if len(raw) < _REQUEST.size:
            raise WireError("half a request")
        handle, epoch, digest, sequence, timeout_ms, chunk, start, rank, size = _REQUEST.unpack_from(raw)
        name = raw[_REQUEST.size :]
        try:
            shard = checked_part(name.decode("ascii"), "shard name")
        except ValueError:
            raise WireError("a request with a broken shard name") from None
        if len(name) != size or rank >= RANKS_MAX or not (chunk == 0 or chunk_allowed(chunk)):
            raise WireError("a request out of bounds")
        return cls(handle.hex(), shard, epoch, rank, digest, timeout_ms, sequence, chunk, start)


@dataclass(frozen=True, slots=True)
class Described:
    """FOUND: all of a record but its bytes; fields as Record's."""

    sequence: int
    token_ids: tuple[int, ...]
    first: FirstToken
    ended: bool
    rows: tuple[int, ...]
    ranks: int

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        return tuple([row * len(self.token_ids) for row in self.rows])

    @property
    def kv_bytes(self) -> int:
        return sum(self.rows) * len(self.token_ids)

    def pack(self) -> bytes:
        tokens, planes, top = len(self.token_ids), len(self.rows), self.first.top
        counts = (tokens, planes, self.first.id, self.first.logprob, self.ranks, self.ended, len(top))
        fixed = _FOUND.pack(self.sequence, self.kv_bytes, *counts)
        words = struct.pack(f"<{tokens + planes}I", *self.token_ids, *self.rows)
        return fixed + b"".join([_TOP.pack(*pair) for pair in top]) + words

    @classmethod
    def unpack(cls, raw: bytes) -> Described:
        """Raises WireError."""
        if len(raw) < _FOUND.size:
            raise WireError("half a description")
        sequence, kv_bytes, tokens, planes, first, logprob, ranks, ended, top = _FOUND.unpack_from(raw)
        words_at = _FOUND.size + top * _TOP.size
        end = words_at + 4 * (tokens + planes)
        if len(raw) != end or top > TOP_TOKENS_MAX or not 0 < ranks <= RANKS_MAX or ended > 1:
            raise WireError("a description out of bounds")
        pairs = [(token, value) for token, value in _TOP.iter_unpack(raw[_FOUND.size : words_at])]
        words = struct.unpack_from(f"<{tokens + planes}I", raw, words_at)
        token = FirstToken(first, logprob, tuple(pairs))
        found = cls(sequence, words[:tokens], token, bool(ended), words[tokens:], ranks)
        if not tokens or not planes or not all(found.rows) or found.kv_bytes != kv_bytes:
            raise WireError("a description that does not add up")
        return found


def chunk_allowed(chunk_bytes: int) -> bool:
    """Whether a puller may ask for chunks of this size."""
    return CHUNK_MIN_BYTES <= chunk_bytes <= CHUNK_MAX_BYTES


def pack_reason(reason: MissReason) -> bytes:
    """One byte."""
    return bytes([_REASONS.index(reason) if reason in _REASONS else 0])


def unpack_reason(raw: bytes) -> MissReason:
    """The reason in the first byte; a MISS has only that one.  Raises WireError."""
    if not raw:
        raise WireError("a miss without a reason")
    return _REASONS[raw[0]] if raw[0] < len(_REASONS) else MissReason.ERROR


def pack_sums(checksums: tuple[int, ...]) -> bytes:
    """The CHUNK frame of so many blocks."""
    return frame(Kind.CHUNK, struct.pack(f"<{len(checksums)}Q", *checksums))


def pack_broken(reason: MissReason, blocks: int) -> bytes:
    """The BROKEN frame where a CHUNK of `blocks` is due: of the same size, to be read in one go."""
    return frame(Kind.BROKEN, pack_reason(reason).ljust(8 * blocks, b"\0"))


def trailer_bytes(blocks: int) -> int:
    """Of a CHUNK, or of the BROKEN in its place."""
    return HEADER.size + 8 * blocks


def unpack_trailer(raw: bytes | memoryview, blocks: int) -> tuple[int, ...] | MissReason:
    """The checksums, or why there will be none.  Raises WireError."""
    header = parse_header(raw[: HEADER.size], Kind.CHUNK, Kind.BROKEN, limit_bytes=8 * blocks)
    if header.payload_bytes != 8 * blocks:
        raise WireError("a chunk with another number of checksums")
    payload = unsealed(header, raw[HEADER.size :])
    if header.kind is Kind.BROKEN:
        return unpack_reason(payload)
    return struct.unpack(f"<{blocks}Q", payload)
