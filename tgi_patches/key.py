"""The deployment's key: who may ask a sidecar for records.  Standard library only.

Each message is signed by HMAC-SHA256 over its parts, each with its length in front, so that no two
lists of parts look the same.  The key proves who asks; it hides nothing of what is sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, ContractError, ShardSpec

KEY_MIN_BYTES = 16


def key_from(env: Mapping[str, str]) -> bytes:
    """The key of the environment, or of the file that it names; empty where there is none.

    Raises ContractError in one sentence, which never holds the key.
    """
    if path := env.get(KEY_FILE_VARIABLE):
        return read_key(Path(path), KEY_FILE_VARIABLE)
    key = env.get(KEY_VARIABLE, "").strip().encode()
    return _long_enough(key) if key else b""


def read_key(path: Path, named_by: str) -> bytes:
    """The key in a file that the flag, setting or variable `named_by` names.

    Raises ContractError in one sentence, which never holds the key.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ContractError(f"The key file {path} ({named_by}) cannot be read: {error.strerror}.") from None
    return _long_enough(key)


def check_keyed(key: bytes, addresses: Iterable[tuple[str, int]], remedy: str) -> None:
    """Whoever reaches an address of the network must not get at records without the deployment's key.

    Raises ContractError for the first of `addresses` that other hosts reach where there is no key; `remedy`
    ends its sentence.
    """
    for host, port in addresses:
        if not key and not is_loopback(host):
            raise ContractError(f"{host}:{port} can be reached from other hosts: {remedy}.")


def open_addresses(spec: ShardSpec) -> Iterator[tuple[str, int]]:
    """Where a sidecar gives records away, or is asked to fetch them.  Raises ContractError."""
    if spec.pull_listen:
        yield listen_address(spec.pull_listen)
    if spec.pulled_bytes:
        yield spec.host, spec.sidecar_port


def listen_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`, with `[...]` around an IPv6 host.  Raises ContractError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ContractError(f"pull_listen must be host:port, not {text!r}.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it; `host` without the brackets of IPv6."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def sign(key: bytes, *parts: str | bytes) -> str:
    """64 hex digits; empty for an empty key."""
    return _digest(key, parts) if key else ""


def signed(key: bytes, signature: str, *parts: str | bytes) -> bool:
    """True when `signature` is `sign(key, *parts)`; compared in constant time."""
    return hmac.compare_digest(sign(key, *parts).encode(), signature.encode(errors="replace"))


def _long_enough(key: bytes) -> bytes:
    if len(key) < KEY_MIN_BYTES:
        raise ContractError(f"The deployment's key must have at least {KEY_MIN_BYTES} bytes.")
    return key


def _digest(key: bytes, parts: tuple[str | bytes, ...]) -> str:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        mac.update(len(raw).to_bytes(8, "little"))
        mac.update(raw)
    return mac.hexdigest()
