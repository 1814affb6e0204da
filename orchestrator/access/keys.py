"""API keys: what a file and a variable name, and whose key a request shows.

No sentence here holds a key, nor a line of the file that may hold one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.access.window import NO_LIMITS, Limits
from orchestrator.config import API_KEYS_VARIABLE
from orchestrator.errors import ConfigError

log = structlog.get_logger()

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
Limit = Field(None, ge=1, le=10**12, strict=True)


class _Entry(BaseModel):
    """What stands behind a name in the file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: str | None = None
    key_sha256: str | None = None
    requests_per_minute: int | None = Limit
    concurrent_requests: int | None = Limit
    tokens_per_minute: int | None = Limit
    priority: Literal["low", "normal", "high"] = "normal"


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: bytes
    """SHA-256 of the key; the key itself is not kept."""
    limits: Limits = NO_LIMITS
    priority: int = 0
    """The highest it may ask for."""


class KeyRing:
    """All keys; of two with one name or one key, ConfigError names the second."""

    def __init__(self, keys: Mapping[str, ApiKey] | None = None) -> None:
        self.keys = dict(keys or {})
        self._digests = [(key.digest, key) for key in self.keys.values()]

    def __len__(self) -> int:
        return len(self.keys)

    def whose(self, authorization: bytes | None) -> ApiKey | None:
        """The key that an `authorization` header shows; takes as long for any key, known or not."""
        digest = shown_digest(authorization)
        if digest is None:
            return None
        found, same = None, hmac.compare_digest
        for known, key in self._digests:
            if same(known, digest):
                found = key
        return found


def shown_digest(authorization: bytes | None) -> bytes | None:
    """SHA-256 of what stands behind `Bearer`."""
    if authorization is None or authorization[:7].lower() != b"bearer ":
        return None
    return hashlib.sha256(authorization[7:].strip()).digest()


def key_ring(file: Path | None, variable: str) -> KeyRing | None:
    """The keys of both; None where neither is given, so that nobody needs one."""
    if file is None and not variable:
        return None
    keys: dict[str, ApiKey] = {}
    digests: set[bytes] = set()
    for where, key in (*_of_file(file), *_of_variable(variable)):
        if key.name in keys:
            raise ConfigError(f"{where}: the API key {key.name} is named twice.")
        if key.digest in digests:
            raise ConfigError(f"{where}: {key.name} has the same key as another name.")
        keys[key.name] = key
        digests.add(key.digest)
    return KeyRing(keys)


def read_secret(path: Path, what: str) -> str:
    """The text of a file; ConfigError when it cannot be read, a warning when everybody can."""
    try:
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("secret_readable_by_all", file=str(path), advice="chmod o-r")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not text.") from None
    except OSError as error:
        raise ConfigError(f"The {what} {path} cannot be read: {error.strerror}.") from None


def checked_key(key: str, where: str) -> bytes:
    """Its SHA-256.  ConfigError for what is too short or could not stand in a header."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where} must be 16 to 512 visible ASCII characters without spaces.")
    return hashlib.sha256(key.encode()).digest()


def _of_variable(text: str) -> Iterator[tuple[str, ApiKey]]:
    for position, part in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        name, equals, key = part.partition("=")
        if not (equals and _NAME.fullmatch(name)):
            raise ConfigError(f"{API_KEYS_VARIABLE}: entry {position} must look like name=key.")
        where = f"{API_KEYS_VARIABLE}: the key of {name}"
        yield API_KEYS_VARIABLE, ApiKey(name, checked_key(key, where))


def _of_file(path: Path | None) -> Iterator[tuple[str, ApiKey]]:
    if path is None:
        return
    where = f"The keys file {path}"
    raw = _yaml(read_secret(path, "keys file"), where)
    entries = raw.get("keys") if isinstance(raw, dict) and set(raw) == {"keys"} else None
    if not isinstance(entries, dict):
        raise ConfigError(f"{where} must hold `keys:` and below it names with their keys.")
    for position, (name, value) in enumerate(entries.items(), 1):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: the name of entry {position} must be 1 to 64 characters of A-Z a-z 0-9 _ . -"
            )
        yield where, _of_entry(name, value, where)


def _of_entry(name: str, value: Any, where: str) -> ApiKey:
    raw = value if isinstance(value, dict) else {"key": value}
    try:
        entry = _Entry.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {name}: {_first(error)}.") from None
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"{where}: {name} needs `key` or `key_sha256`, and not both.")
    if entry.key is not None:
        digest = checked_key(entry.key, f"{where}: the key of {name}")
    elif _DIGEST.fullmatch(text := (entry.key_sha256 or "").lower()):
        digest = bytes.fromhex(text)
    else:
        raise ConfigError(f"{where}: key_sha256 of {name} must be 64 hexadecimal digits.")
    limits = Limits(entry.requests_per_minute, entry.concurrent_requests, entry.tokens_per_minute)
    return ApiKey(name, digest, limits, PRIORITIES[entry.priority])


def _first(error: ValidationError) -> str:
    """What is wrong, without the value; a field that is not known may be a key in the wrong place."""
    first = error.errors(include_input=False, include_url=False)[0]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"only {', '.join(_Entry.model_fields)} are known"
    if first["loc"] in (("key",), ("key_sha256",)):
        return f"{first['loc'][0]} must be text: put it in quotes"
    return f"{first['loc'][0]}: {first['msg']}"


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice, of which YAML would take the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen = set()
    for name, _ in node.value:
        if isinstance(name, yaml.ScalarNode) and name.value in seen:
            raise yaml.constructor.ConstructorError(problem="twice", problem_mark=name.start_mark)
        seen.add(name.value if isinstance(name, yaml.ScalarNode) else id(name))
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        # Neither the message nor the excerpt: both may show a key.
        mark = error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark else ""
        told = "names something twice" if error.problem == "twice" else "is not YAML"
        raise ConfigError(f"{where} {told}{line}.") from None
    except yaml.YAMLError:
        raise ConfigError(f"{where} is not YAML.") from None
