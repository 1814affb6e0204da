"""What holds a secret, told by its name or by its look: none of it is written anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_WORDS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH", "COOKIE")
HARMLESS = frozenset({"TOKENIZERS_PARALLELISM"})
"""Names with such a word in them that everybody sets and that hold no secret."""

_LOOKS = re.compile(r"://[^/\s]*@|\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bBearer\s+\S", re.IGNORECASE)
"""A URL with a user, a hub token, an API key, a header."""
SHORTEST = 6
"""A value shorter than this is no secret that could be told from other words."""


def names_secret(name: str) -> bool:
    """Whether a variable or flag of that name must be taken for a secret."""
    plain = name.upper().replace("-", "_")
    return plain not in HARMLESS and any(word in plain for word in _WORDS)


def looks_secret(value: str) -> bool:
    """Whether the value itself shows that it is one, whatever its name."""
    return _LOOKS.search(value) is not None


def secret_values(env: Mapping[str, str], known: Iterable[str] = ()) -> frozenset[str]:
    """Values that must appear nowhere: those of secret names, and `known` ones."""
    named = (value for name, value in env.items() if names_secret(name) or looks_secret(value))
    return frozenset(value for value in (*named, *known) if len(value) >= SHORTEST)


def repeats_secret(value: str, secrets: Iterable[str]) -> bool:
    """Whether `value` is, or has in it, a secret."""
    return looks_secret(value) or any(secret in value for secret in secrets)
