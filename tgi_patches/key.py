"""The deployment's key: who may ask a sidecar for records.  Standard library only.

Each message is signed by HMAC-SHA256 over its parts, each with its length in front, so that no two
lists of parts look the same.  The key proves who asks; it hides nothing of what is sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, ContractError

KEY_MIN_BYTES = 16


def key_from(env: Mapping[str, str]) -> bytes:
    """The key of the environment, or of the file that it names; empty where there is none.

    Raises ContractError in one sentence, which never holds the key.
    """
    if path := env.get(KEY_FILE_VARIABLE):
        try:
            key = Path(path).read_bytes().strip()
        except OSError as error:
            raise ContractError(
                f"The key file {path} ({KEY_FILE_VARIABLE}) cannot be read: {error.strerror}."
            ) from None
    else:
        key = env.get(KEY_VARIABLE, "").strip().encode()
        if not key:
            return b""
    if len(key) < KEY_MIN_BYTES:
        raise ContractError(f"The deployment's key must have at least {KEY_MIN_BYTES} bytes.")
    return key


def sign(key: bytes, *parts: str | bytes) -> str:
    """64 hex digits; empty for an empty key."""
    return _digest(key, parts) if key else ""


def signed(key: bytes, signature: str, *parts: str | bytes) -> bool:
    """True when `signature` is `sign(key, *parts)`; compared in constant time."""
    return hmac.compare_digest(sign(key, *parts).encode(), signature.encode(errors="replace"))


def _digest(key: bytes, parts: tuple[str | bytes, ...]) -> str:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        mac.update(len(raw).to_bytes(8, "little"))
        mac.update(raw)
    return mac.hexdigest()
