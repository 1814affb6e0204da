"""The deployment's key: which one holds, and a file for one of our own.  It is never shown anywhere."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from orchestrator.access.exposure import is_loopback
from orchestrator.config import API_KEYS_VARIABLE, KEY_VARIABLES, Loaded
from orchestrator.deployment.state import StateFolder
from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection
from tgi_patches.contract import KEY_FILE_VARIABLE
from tgi_patches.key import key_from, read_key

KEY_FILE = "key"
ADMIN_TOKEN_FILE = "admin-token"
KEY_BYTES = 32


def key_env(loaded: Loaded, env: Mapping[str, str]) -> dict[str, str]:
    """How a child process finds the key: `key_file` of the settings, else what `env` names; or nothing.

    Raises ContractError for a key that cannot be used.
    """
    if (path := loaded.settings.key_file) is not None:
        read_key(path, _named_by(loaded.origins["key_file"]))
        return {KEY_FILE_VARIABLE: str(path)}
    found = {name: env[name] for name in KEY_VARIABLES if env.get(name)}
    key_from(found)
    return found


def _named_by(origin: str) -> str:
    """In the user's own words: the flag, the variable, or the key and the file that it stands in."""
    kind, _, where = origin.partition(" ")
    return {"flag": "--key-file", "env": where}.get(kind, f"key_file in {where}")


def minted(folder: StateFolder) -> dict[str, str]:
    """The same, with a key that stands in the state folder from the first time on.

    The caller holds the folder's lock.
    """
    path = folder.path / KEY_FILE
    if not path.exists():
        try:
            _write(path)
        except OSError as error:
            raise ConfigError(f"The key file {path} cannot be written: {error.strerror}.") from None
    read_key(path, "made by `up`")
    return {KEY_FILE_VARIABLE: str(path)}


def minted_admin_token(gateway: GatewaySection, folder: StateFolder, env: Mapping[str, str]) -> Path | None:
    """The file of the token that `/admin` asks for; None where this machine is let in without one.

    A gateway with API keys that other machines reach gets a token of its own: `status` then needs no
    client's key, and no client's key opens the administration.
    """
    if gateway.admin_token_file is not None:
        return gateway.admin_token_file
    keys = gateway.keys_file is not None or bool(env.get(API_KEYS_VARIABLE))
    if not keys or is_loopback(gateway.admin_host or gateway.host):
        return None
    path = folder.path / ADMIN_TOKEN_FILE
    if not path.exists():
        try:
            _write(path)
        except OSError as error:
            raise ConfigError(f"The admin token file {path} cannot be written: {error.strerror}.") from None
    return path


def _write(path: Path) -> None:
    """In one step, readable by its owner only."""
    fresh = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
    fresh.replace(path)
