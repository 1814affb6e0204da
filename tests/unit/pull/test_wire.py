"""Frames survive the way there, and what is no frame is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import MissReason
from tgi_patches.pull.wire import (
    Described,
    Header,
    Hello,
    Kind,
    Request,
    WireError,
    frame,
    pack_broken,
    pack_reason,
    pack_sums,
    parse_header,
    trailer_bytes,
    unpack_reason,
    unpack_trailer,
    unsealed,
)

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
LOGPROB = st.floats(allow_nan=False)
PART = st.text("AZaz09_.-", min_size=1, max_size=64).filter(lambda name: name not in (".", ".."))

hellos = st.builds(Hello, st.binary(min_size=32, max_size=32), st.booleans(), U16)
requests = st.builds(
    Request,
    handle=st.binary(min_size=16, max_size=16).map(bytes.hex),
    shard=PART,
    epoch=U64,
    rank=st.integers(0, 1023),
    digest=U64,
    timeout_ms=U32,
    sequence=U64,
    chunk_bytes=st.just(0) | st.integers(256 * 1024, 64 * 2**20),
    start_chunk=U32,
)
tops = st.lists(st.tuples(U32, LOGPROB), max_size=11).map(tuple)
descriptions = st.builds(
    Described,
    sequence=U64,
    token_ids=st.lists(U32, min_size=1, max_size=40).map(tuple),
    first=st.builds(FirstToken, U32, LOGPROB, tops),
    ended=st.booleans(),
    rows=st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=8).map(tuple),
    ranks=st.integers(1, 1024),
)


def parsed(raw: bytes, *kinds: Kind, limit_bytes: int = 1024) -> bytes:
    header = parse_header(raw[:16], *kinds, limit_bytes=limit_bytes)
    assert header.payload_bytes == len(raw) - 16
    return unsealed(header, raw[16:])


@given(hello=hellos)
def test_a_greeting_arrives(hello: Hello) -> None:
    assert Hello.unpack(parsed(frame(Kind.HELLO, hello.pack()), Kind.HELLO, Kind.WELCOME)) == hello


@given(request=requests)
def test_a_request_arrives(request: Request) -> None:
    assert Request.unpack(parsed(frame(Kind.FETCH, request.pack()), Kind.DESCRIBE, Kind.FETCH)) == request


@given(found=descriptions)
def test_a_description_arrives(found: Described) -> None:
    assert Described.unpack(parsed(frame(Kind.FOUND, found.pack()), Kind.FOUND, limit_bytes=2**20)) == found


def test_a_description_lies_as_documented() -> None:
    """Little-endian; sizes follow from the fields by hand."""
    found = Described(3, (7, 8), FirstToken(9, -0.5, ((9, -0.5),)), True, (16, 32), 2)
    assert found.pack() == (
        struct.pack("<QQIII", 3, 2 * 48, 2, 2, 9)
        + struct.pack("<d", -0.5)
        + struct.pack("<HBB", 2, 1, 1)
        + struct.pack("<Id", 9, -0.5)
        + struct.pack("<IIII", 7, 8, 16, 32)
    )
    assert (found.kv_bytes, found.plane_bytes) == (96, (32, 64))


@given(sums=st.lists(U64, min_size=1, max_size=64).map(tuple))
def test_checksums_arrive_and_so_does_why_there_are_none(sums: tuple[int, ...]) -> None:
    assert unpack_trailer(pack_sums(sums), len(sums)) == sums
    broken = pack_broken(MissReason.OVERWRITTEN, len(sums))
    assert len(broken) == len(pack_sums(sums)) == trailer_bytes(len(sums)) == 16 + 8 * len(sums)
    assert unpack_trailer(broken, len(sums)) is MissReason.OVERWRITTEN


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_reason_arrives_or_is_an_error(reason: MissReason) -> None:
    """Some never travel: what the reader of a record finds out by itself."""
    travels = reason not in (MissReason.TOKENS_DIFFER, MissReason.PINNED_FULL)
    assert unpack_reason(pack_reason(reason)) == (reason if travels else MissReason.ERROR)
    assert unpack_reason(b"\xff") == MissReason.ERROR


@given(found=descriptions, data=st.data())
def test_any_flipped_bit_of_a_frame_is_seen(found: Described, data: st.DataObject) -> None:
    raw = bytearray(frame(Kind.FOUND, found.pack()))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        received(bytes(raw))


def received(raw: bytes) -> bytes:
    """What a receiver makes of it that takes any frame."""
    header = parse_header(raw[:16], *Kind, limit_bytes=2**32)
    if header.payload_bytes != len(raw) - 16:
        raise WireError("the next frame would start in the wrong place")
    return unsealed(header, raw[16:])


@given(raw=st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(raw: bytes) -> None:
    for unpack in (Hello.unpack, Request.unpack, Described.unpack):
        refused_or_valid(unpack, raw)


def refused_or_valid(unpack: Callable[[bytes], Hello | Request | Described], raw: bytes) -> None:
    try:
        found = unpack(raw)
    except WireError:
        return
    assert found.pack() == raw


REQUEST = Request("ab" * 16, "shard-1", 5, 0, 6, 1000)
FOUND = Described(1, (1, 2), FirstToken(3, -1.0), False, (4, 4), 1).pack()


@pytest.mark.parametrize(
    ("unpack", "raw"),
    [
        (Hello.unpack, Hello(bytes(32), True).pack()[:-1]),
        (Hello.unpack, b"GET / HTTP/1.1\r\n".ljust(48, b"\0")),
        (Request.unpack, REQUEST.pack()[:20]),
        (Request.unpack, REQUEST.pack()[:-1]),
        (Request.unpack, REQUEST.pack() + b"x"),
        (Request.unpack, REQUEST.pack().replace(b"shard-1", b"../etc/")),
        (Request.unpack, REQUEST.pack().replace(b"shard-1", b"sh\xffrd-1")),
        (Request.unpack, Request("ab" * 16, "s", 5, 1024, 6, 1000).pack()),
        (Request.unpack, Request("ab" * 16, "s", 5, 0, 6, 1000, chunk_bytes=256 * 1024 - 1).pack()),
        (Request.unpack, Request("ab" * 16, "s", 5, 0, 6, 1000, chunk_bytes=64 * 2**20 + 1).pack()),
        (Described.unpack, FOUND[:30]),
        (Described.unpack, FOUND[:-1]),
        (Described.unpack, FOUND + b"x"),
        (Described.unpack, Described(1, (), FirstToken(3, -1.0), False, (4,), 1).pack()),
        (Described.unpack, Described(1, (1,), FirstToken(3, -1.0), False, (), 1).pack()),
        (Described.unpack, Described(1, (1,), FirstToken(3, -1.0), False, (4, 0), 1).pack()),
        (Described.unpack, Described(1, (1,), FirstToken(3, -1.0), False, (4,), 0).pack()),
        (Described.unpack, Described(1, (1,), FirstToken(3, -1.0), False, (4,), 1025).pack()),
        (Described.unpack, Described(1, (1,), FirstToken(3, -1.0, ((1, 0.0),) * 12), False, (4,), 1).pack()),
        (Described.unpack, FOUND[:8] + struct.pack("<Q", 17) + FOUND[16:]),
        (unpack_reason, b""),
    ],
)
def test_what_is_out_of_bounds_is_refused(unpack: Callable[[bytes], object], raw: bytes) -> None:
    with pytest.raises(WireError):
        unpack(raw)


def test_a_count_of_tokens_beyond_the_frame_allocates_nothing() -> None:
    huge = FOUND[:16] + struct.pack("<I", 2**32 - 1) + FOUND[20:]
    with pytest.raises(WireError, match="out of bounds"):
        Described.unpack(huge)


def test_a_frame_of_another_kind_or_too_large_is_refused_by_its_header() -> None:
    hello = frame(Kind.HELLO, Hello(bytes(32), False).pack())
    assert parse_header(hello[:16], Kind.HELLO) == Header(
        Kind.HELLO, 48, xxh3_64_intdigest(hello[16:], 1 << 32 | 48)
    )
    with pytest.raises(WireError, match="where WELCOME is due"):
        parse_header(hello[:16], Kind.WELCOME)
    with pytest.raises(WireError, match="1025 bytes"):
        parse_header(frame(Kind.MISS, bytes(1025))[:16], Kind.MISS)
    with pytest.raises(WireError, match="frame 99"):
        parse_header(bytes([99]) + hello[1:16], Kind.HELLO)


def test_a_chunk_with_another_number_of_checksums_is_refused() -> None:
    with pytest.raises(WireError):
        unpack_trailer(pack_sums((1, 2)), 3)
