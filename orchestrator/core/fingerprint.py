"""A prompt's fingerprint: an identity, and 64 bits of which few differ between similar prompts.

A one-bit minwise sketch (Li and König, "b-Bit Minwise Hashing", WWW 2010) by one permutation (Li, Owen and
Zhang, NIPS 2012), empty bins filled by rotation (Shrivastava and Li, ICML 2014): texts whose sets of words
have Jaccard similarity J differ in 32 * (1 - J) bits; in a SimHash it would grow like sqrt(1 - J).
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

BITS = 64
NEAR_BITS = 7
"""Prompts of 100 words and more that differ in three of them are this near; unrelated ones differ by 20."""

_WINDOW_CHARS = 2048
_WINDOWS = 4
"""A longer text is known by so many parts of it, which bounds the cost."""

_SPLITTING = string.whitespace + string.punctuation
_SPLITTING_CONTINUATIONS = b"\x80\x84\x86\x89\x8b\x8e\x90\x93\x95\x98\x9a\x9d\x9f\xa2"
"""Bytes within UTF-8 characters that end a shingle too, so that scripts without spaces are cut by content,
every few characters.  Second bytes that all characters of a script have in common are not among them."""
_SHINGLES = bytes.maketrans(
    string.ascii_uppercase.encode() + _SPLITTING.encode() + _SPLITTING_CONTINUATIONS,
    string.ascii_lowercase.encode() + b" " * (len(_SPLITTING) + len(_SPLITTING_CONTINUATIONS)),
)

_BIN_BITS = 6
_NONE = 1 << BITS


def identity(parts: Iterable[bytes]) -> str:
    """32 hex digits, equal for equal parts only: each goes in with its length."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def distance(a: int, b: int) -> int:
    """In how many bits two fingerprints differ."""
    return (a ^ b).bit_count()


def simhash(text: str) -> int:
    """64 bits that depend on which words `text` has; 0 where it has none.  The same in every process."""
    shingles = _shingles(text)
    return _packed(_least_by_bin(shingles)) if shingles else 0


def _shingles(text: str) -> set[bytes]:
    """Distinct words in lower case, without punctuation; cut again in other scripts than Latin."""
    if len(text) > _WINDOWS * _WINDOW_CHARS:
        text = _windows(text)
    return set(text.encode("utf-8", "surrogatepass").translate(_SHINGLES).split())


def _windows(text: str) -> str:
    """Evenly spread, first and last included: a text that is a little longer has nearly the same ones."""
    room = len(text) - _WINDOW_CHARS
    starts = (room * i // (_WINDOWS - 1) for i in range(_WINDOWS))
    return " ".join([text[start : start + _WINDOW_CHARS] for start in starts])


def _least_by_bin(shingles: Iterable[bytes]) -> list[int]:
    """The least hash in each of 64 bins, `_NONE` where there is none."""
    least = [_NONE] * BITS
    for hashed in map(xxh3_64_intdigest, shingles):
        place = hashed & (BITS - 1)
        if hashed < least[place]:
            least[place] = hashed
    return least


def _packed(least: list[int]) -> int:
    """One bit of each bin; an empty bin takes another bit of the next one that is not, round the end."""
    away = next(place for place, hashed in enumerate(least) if hashed != _NONE)
    filled = least[away]
    bits = 0
    for hashed in reversed(least):
        if hashed == _NONE:
            away += 1
        else:
            filled, away = hashed, 0
        bits = bits << 1 | (filled >> _BIN_BITS + away & 1)
    return bits or 1
