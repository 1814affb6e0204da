"""Copies in and out of a record, with the checksum of every 256 KiB fused in.

Each block's destination is hashed right after it was copied, while it is in the cache.  The loops
are written out: at 20 GB/s a Python call per piece shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from tgi_patches.bridge import Planes
from tgi_patches.contract import BridgeMiss, MissReason

BLOCK_BYTES = 256 * 1024
"""One checksum covers this much of a record's data; the last block may be shorter."""

UPDATE_BYTES = 64 * 1024
"""Hashed at once.  Above this xxhash lets go of the GIL, and getting it back from a busy thread costs
a 5 ms switch interval each time: measured 459 ms instead of 13 for 128 MiB."""


def checksum(data: bytes | memoryview, seed: int = 0) -> int:
    """xxh3_64 of a record's or slot's description."""
    return xxh3_64_intdigest(data, seed)


def block_count(kv_bytes: int) -> int:
    """Checksums that `kv_bytes` of data carry."""
    return -(-kv_bytes // BLOCK_BYTES)


def plane_bytes(plane: Sequence[memoryview]) -> int:
    """Bytes of one plane's runs together."""
    return sum(map(len, plane))


def checked_kv_bytes(planes: Planes, tokens: int) -> int:
    """Bytes of all planes together; LAYOUT unless each is a whole number of bytes per token."""
    sizes = [plane_bytes(plane) for plane in planes]
    if tokens <= 0 or not sizes or any(not size or size % tokens for size in sizes):
        raise BridgeMiss(MissReason.LAYOUT, f"{len(sizes)} planes do not divide into {tokens} tokens")
    return sum(sizes)


def copy_in(data: memoryview, planes: Planes) -> tuple[int, ...]:
    """Fill `data` with all runs in order; the checksums of its blocks."""
    sums: list[int] = []
    hasher = xxh3_64()
    position, block_end = 0, BLOCK_BYTES
    for plane in planes:
        for run in plane:
            offset, run_bytes = 0, len(run)
            while offset < run_bytes:
                size = min(run_bytes - offset, block_end - position)
                data[position : position + size] = run[offset : offset + size]
                position += size
                offset += size
                if position == block_end:
                    _hash(hasher, data[block_end - BLOCK_BYTES : block_end])
                    sums.append(hasher.intdigest())
                    hasher.reset()
                    block_end += BLOCK_BYTES
    if position % BLOCK_BYTES:
        _hash(hasher, data[block_end - BLOCK_BYTES : position])
        sums.append(hasher.intdigest())
    return tuple(sums)


def copy_out(data: memoryview, planes: Planes, tokens: int, of_tokens: int) -> tuple[int, ...]:
    """Fill the runs with the first `tokens` of the `of_tokens` tokens of every plane in `data`.

    Returns the blocks' checksums over what the runs now hold and, for tokens that were not asked
    for, over `data` itself: so every byte that was delivered has been hashed where it arrived.
    """
    sums: list[int] = []
    hasher = xxh3_64()
    position, block_end = 0, BLOCK_BYTES
    for run, run_bytes in _runs(planes, tokens, of_tokens):
        offset = 0
        while offset < run_bytes:
            size = min(run_bytes - offset, block_end - position)
            arrived = data[position : position + size]
            if run is not None:
                target = run[offset : offset + size]
                target[:] = arrived
                arrived = target
            if size <= UPDATE_BYTES:
                hasher.update(arrived)
            else:
                _hash(hasher, arrived)
            position += size
            offset += size
            if position == block_end:
                sums.append(hasher.intdigest())
                hasher.reset()
                block_end += BLOCK_BYTES
    if position % BLOCK_BYTES:
        sums.append(hasher.intdigest())
    return tuple(sums)


def _runs(planes: Planes, tokens: int, of_tokens: int) -> Iterator[tuple[memoryview | None, int]]:
    """Every run with its size; then, per plane, None for the tokens that have no run."""
    for plane in planes:
        for run in plane:
            yield run, len(run)
        if tokens < of_tokens:
            yield None, plane_bytes(plane) // tokens * (of_tokens - tokens)


def _hash(hasher: xxh3_64, data: memoryview) -> None:
    """Take `data`, in updates that keep the GIL."""
    for start in range(0, len(data), UPDATE_BYTES):
        hasher.update(data[start : start + UPDATE_BYTES])
