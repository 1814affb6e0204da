"""Copies in and out of a record, with a checksum of at most 256 KiB fused in.

Blocks start anew with every plane, and each is hashed where it arrived right after it was copied,
while it is in the cache.  At 20 GB/s every Python statement per piece shows, so the loops are written out.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from tgi_patches.bridge import Planes
from tgi_patches.contract import BridgeMiss, MissReason

BLOCK_BYTES = 256 * 1024
"""One checksum covers this much of a plane; a plane's last block may be shorter.

Hashing more than 64 KiB lets go of the GIL.  That costs nothing beside a thread that mostly waits,
as a shard's event loop does, and lets it go on in the middle of a large copy.
"""

COPY_BYTES = 2 * BLOCK_BYTES
"""Copied before it is hashed: the caches of a core hold it, and two blocks share the Python around them."""


def checksum(data: bytes | memoryview, seed: int = 0) -> int:
    """xxh3_64 of a record's or slot's description."""
    return xxh3_64_intdigest(data, seed)


def block_count(plane_bytes: Sequence[int]) -> int:
    """Checksums that planes of these sizes carry."""
    return sum([-(-size // BLOCK_BYTES) for size in plane_bytes])


def sizes(planes: Planes) -> list[int]:
    """Bytes of every plane, its runs together."""
    return [len(plane[0]) if len(plane) == 1 else sum(map(len, plane)) for plane in planes]


def bytes_per_token(plane_bytes: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Of every plane; LAYOUT unless each holds a whole number."""
    if tokens > 0 and plane_bytes and min(plane_bytes) > 0:
        rows = tuple([size // tokens for size in plane_bytes])
        if sum(rows) * tokens == sum(plane_bytes):
            return rows
    raise BridgeMiss(MissReason.LAYOUT, f"{len(plane_bytes)} planes do not divide into {tokens} tokens")


def copy_in(data: memoryview, planes: Planes) -> tuple[int, ...]:
    """Fill `data` with all runs in order; the checksums of its blocks."""
    sums: list[int] = []
    end = 0
    for plane in planes:
        hashed = end
        for run in plane:
            for piece in (run,) if len(run) <= COPY_BYTES else _pieces(run):
                start, end = end, end + len(piece)
                data[start:end] = piece
                while end - hashed >= BLOCK_BYTES:
                    sums.append(xxh3_64_intdigest(data[hashed : hashed + BLOCK_BYTES]))
                    hashed += BLOCK_BYTES
        if end > hashed:
            sums.append(xxh3_64_intdigest(data[hashed:end]))
    return tuple(sums)


def copy_out(data: memoryview, planes: Planes, plane_bytes: Sequence[int]) -> tuple[int, ...]:
    """Fill the runs from `data`, where plane `i` has `plane_bytes[i]`; runs that hold less get its start.

    Returns the blocks' checksums over what the runs now hold and, for bytes that were not asked
    for, over `data` itself: so every byte that was delivered has been hashed where it arrived.
    """
    sums: list[int] = []
    start = 0
    for plane, size in zip(planes, plane_bytes, strict=True):
        stored = data[start : start + size]
        if len(plane) == 1 and len(plane[0]) == size:
            _copy_to_run(stored, plane[0], sums)
        else:
            _copy_to_runs(stored, plane, sums)
        start += size
    return tuple(sums)


def _copy_to_run(stored: memoryview, run: memoryview, sums: list[int]) -> None:
    if len(run) <= BLOCK_BYTES:
        run[:] = stored
        sums.append(xxh3_64_intdigest(run))
        return
    for start in range(0, len(run), COPY_BYTES):
        target = run[start : start + COPY_BYTES]
        target[:] = stored[start : start + COPY_BYTES]
        ends = range(BLOCK_BYTES, len(target) + BLOCK_BYTES, BLOCK_BYTES)
        sums.extend([xxh3_64_intdigest(target[end - BLOCK_BYTES : end]) for end in ends])


def _copy_to_runs(stored: memoryview, plane: Sequence[memoryview], sums: list[int]) -> None:
    """The same where a block lies in several runs, or a part of it in none."""
    hasher = xxh3_64()
    start, left = 0, BLOCK_BYTES
    for run in plane:
        offset, run_bytes = 0, len(run)
        while offset < run_bytes:
            target = run[offset : offset + left]
            size = len(target)
            target[:] = stored[start : start + size]
            hasher.update(target)
            start += size
            offset += size
            left -= size
            if not left:
                sums.append(hasher.intdigest())
                hasher.reset()
                left = BLOCK_BYTES
    while start < len(stored):
        rest = stored[start : start + left]
        hasher.update(rest)
        sums.append(hasher.intdigest())
        hasher.reset()
        start += len(rest)
        left = BLOCK_BYTES
    if left < BLOCK_BYTES:
        sums.append(hasher.intdigest())


def _pieces(run: memoryview) -> list[memoryview]:
    return [run[start : start + COPY_BYTES] for start in range(0, len(run), COPY_BYTES)]
