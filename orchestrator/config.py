"""Reads the settings: flag, then environment, then YAML file, then default.

Every value is known by its dotted key (`gateway.listen`); a source is a mapping of such keys, so
precedence is one dictionary update per source and the origin of each value stays known.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ValidationError

from orchestrator.errors import ConfigError
from orchestrator.settings import DEFAULT_MODEL, Settings
from tgi_patches.contract import (
    EPOCH_VARIABLE,
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    SPEC_VARIABLE,
    STRICT_VARIABLE,
)

__all__ = ["DEFAULT_MODEL", "Loaded", "Settings", "hidden", "load_settings"]

ENV_PREFIX = "ORCHESTRATOR_"
KEY_VARIABLES = frozenset({KEY_VARIABLE, KEY_FILE_VARIABLE})
API_KEYS_VARIABLE = "ORCHESTRATOR_API_KEYS"
"""`name=key,name=key`: API keys of clients, besides those of the keys file."""
RESERVED_VARIABLES = KEY_VARIABLES | {
    SPEC_VARIABLE,
    EPOCH_VARIABLE,
    STRICT_VARIABLE,
    API_KEYS_VARIABLE,
    "ORCHESTRATOR_CONFIG",
}
"""Variables with our prefix that are not settings."""
SECRET_KEYS = frozenset({"redis.url"})
"""May hold a password: never shown as they are."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for every dotted key, `flag`, `env NAME`, `file PATH` or `default`."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) in the order of the settings; passwords hidden."""
        for key, origin in self.origins.items():
            value: Any = self.settings
            for name in key.split("."):
                value = getattr(value, name)
            yield key, hidden(key, value), origin

    def told(self) -> dict[str, Any]:
        """Every setting by its dotted key, as JSON has it; passwords hidden."""
        plain = self.settings.model_dump(mode="json")
        found = {}
        for key in self.origins:
            value: Any = plain
            for name in key.split("."):
                value = value[name]
            found[key] = hidden(key, value)
        return found


def hidden(key: str, value: Any) -> Any:
    """`value`, without the password of an URL."""
    if key not in SECRET_KEYS or not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.password is None:
        return value
    return value.replace(f":{parts.password}@", ":***@", 1)


def load_settings(path: Path | None, flags: Mapping[str, Any], env: Mapping[str, str]) -> Loaded:
    """Merge the sources; `flags` by dotted key, None for a flag that was not given.

    Raises ConfigError with one sentence that names the key, where it stands and, for a key that
    does not exist, the nearest one that does.
    """
    keys = dict(_leaves(Settings))
    sources = [
        ("default", keys),
        *([(f"file {path}", _from_file(path))] if path else []),
        *_from_env(env, keys),
        ("flag", {key: value for key, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, given in sources:
        for key in given:
            if key not in keys:
                raise ConfigError(f"{_where(origin)}: {_unknown(key)}")
            origins[key] = origin
        if origin != "default":
            values |= given
    try:
        settings = Settings.model_validate(_nested(values))
    except ValidationError as error:
        raise ConfigError(_sentence(error, origins)) from None
    return Loaded(settings, origins)


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, annotation) of everything that holds a value."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def _from_file(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The file {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(raw or {}, dict):
        raise ConfigError(f"The file {path} must hold keys and values, such as `version: 1`.")
    return dict(_flat(raw or {}, Settings, path))


def _flat(
    raw: Mapping[Any, Any], model: type[BaseModel], path: Path, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        key = f"{prefix}{name}"
        field = model.model_fields.get(str(name))
        section = field.annotation if field else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            yield key, value
        elif isinstance(value, dict):
            yield from _flat(value, section, path, f"{key}.")
        elif value is not None:
            raise ConfigError(f"{path}: {key} must be a section with keys of its own.")


def _from_env(env: Mapping[str, str], keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One source per variable, so that its name is the origin; an empty one counts as not set."""
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_VARIABLES or not env[name]:
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        value: Any = env[name]
        if typing.get_origin(keys.get(key)) in (list, dict):
            try:
                value = yaml.safe_load(value)
            except yaml.YAMLError:
                raise ConfigError(f"{name} must be written as JSON.") from None
        yield f"env {name}", {key: value}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree


LIKE_ENOUGH = 1.0
"""Of at most 2, one for the whole key and one for its last part."""


def _unknown(key: str) -> str:
    last = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, key, known).ratio()
        return whole + SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()

    if key in (known := _names()):
        return f"{key} is a section; give its keys one by one."
    nearest = max(sorted(known), key=likeness)
    if likeness(nearest) < LIKE_ENOUGH:
        return f"there is no key {key!r}; `config show` lists all."
    return f"there is no key {key!r}; the nearest one is {nearest!r}."


def _names() -> set[str]:
    """Every key and every section."""
    leaves = [key for key, _ in _leaves(Settings)]
    sections = {key.rpartition(".")[0] for key in leaves}
    return set(leaves) | sections - {""} | {s.rpartition(".")[0] for s in sections} - {""}


def _names_a_user(given: object) -> bool:
    """Whether it is an URL of the kind that may hold a password."""
    return isinstance(given, str) and "@" in given


def _where(origin: str) -> str:
    return origin.partition(" ")[2] or origin


def _sentence(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first thing that is wrong; the rest is counted."""
    first, *more = error.errors()
    text = first["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:] if text.startswith("Input") else text
    parts = [str(part) for part in first["loc"]]
    key = next((k for k in (".".join(parts[:n]) for n in range(len(parts), 0, -1)) if k in origins), "")
    if key:
        given = first["input"]
        shown = "" if key in SECRET_KEYS or _names_a_user(given) else f" is {given!r}"
        text = f"{_where(origins[key])}: {key}{shown}: {text}"
    elif parts:
        text = f"{'.'.join(parts)}: {text}"
    rest = f" ({len(more)} more)" if more else ""
    return f"{text.rstrip('.')}{rest}."
