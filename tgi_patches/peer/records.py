"""The records that travel: random bytes in the planes of a small model, known by their digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tgi_patches.contract import Fingerprint

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
ROW_BYTES = KV_HEADS * HEAD_DIM * 4
"""One token of one plane."""
PLANES = 2 * LAYERS
FINGERPRINT = Fingerprint(
    "doctor", "", "", "float32", "float32", layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
)
RING_RECORDS = 4
"""A record may have a quarter of a ring."""
RECORD_TTL_S = 600.0
GIVER, TAKER, NEIGHBOUR = "giver", "taker", "neighbour"
"""Names of the ends: in the other container, in this one, and in a second process of this one."""


def tokens_of(size_bytes: int) -> int:
    """As many as a record of at most so many bytes holds."""
    return max(1, size_bytes // (PLANES * ROW_BYTES))


def record_bytes(size_bytes: int) -> int:
    return tokens_of(size_bytes) * PLANES * ROW_BYTES


def ring_bytes(size_bytes: int) -> int:
    """Of a ring in which such records travel."""
    return RING_RECORDS * (size_bytes + 2**20)


def planes_of(data: memoryview, tokens: int) -> list[list[memoryview]]:
    """`data` cut into the planes of a record."""
    plane = tokens * ROW_BYTES
    return [[data[start : start + plane]] for start in range(0, PLANES * plane, plane)]


def fill(data: memoryview) -> str:
    """New random bytes; their digest."""
    data[:] = os.urandom(len(data))
    return digest_of(data)


def digest_of(data: memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_at(path: Path) -> list[int]:
    """(device, inode): the same in two containers exactly where they map the same memory.  Raises OSError."""
    found = os.lstat(path)
    return [found.st_dev, found.st_ino]
