"""Settings as environment variables: how a child process gets exactly the parent's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import API_KEYS_VARIABLE, ENV_PREFIX, KEY_VARIABLES, Loaded
from orchestrator.settings import Settings

_SECRETS = KEY_VARIABLES | {API_KEYS_VARIABLE}


def child_env(loaded: Loaded, env: Mapping[str, str], changes: Mapping[str, Any]) -> dict[str, str]:
    """`env` for a child that must see the settings of `loaded`, with `changes` by dotted key on top.

    Values that are defaults stay defaults in the child, so that it may still bound them by the model.
    Where `env` names the deployment's key, or API keys, the child finds them there too.
    """
    kept = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX) or name in _SECRETS}
    chosen = (key for key, origin in loaded.origins.items() if origin != "default" and key != "version")
    return kept | variables(loaded.settings, chosen) | _named(changes)


def variables(settings: Settings, keys: Iterable[str]) -> dict[str, str]:
    """One variable for each dotted key that has a value."""
    values: dict[str, Any] = {}
    for key in keys:
        value: Any = settings
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = value
    return _named(values)


def _named(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        ENV_PREFIX + key.upper().replace(".", "__"): _text(value)
        for key, value in values.items()
        if value is not None
    }


def _text(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, (str, Path)) else str(value)
