"""What several commands need: settings from flags, and the running deployment they talk to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import Loaded, load_settings
from orchestrator.deployment.state import State, StateFolder
from orchestrator.errors import Unreachable

CONFIG_VARIABLE = "ORCHESTRATOR_CONFIG"
INTERRUPTED = 130
"""Exit code of a command that a signal ended before it was done, as a shell gives it for Ctrl-C."""


def settings_of(config: Path | None, flags: Mapping[str, Any], *, port: int | None = None) -> Loaded:
    """Settings with `flags` on top; `port` replaces the port of `gateway.listen` only."""
    path = config or _path_in(os.environ)
    loaded = load_settings(path, flags, os.environ)
    if port is None:
        return loaded
    host = loaded.settings.gateway.listen.rpartition(":")[0]
    return load_settings(path, {**flags, "gateway.listen": f"{host}:{port}"}, os.environ)


def _path_in(env: Mapping[str, str]) -> Path | None:
    name = env.get(CONFIG_VARIABLE)
    return Path(name) if name else None


def deployment_name(config: Path | None, deployment: str | None) -> str:
    return settings_of(config, {"deployment": deployment}).settings.deployment


def folder_of(deployment: str) -> StateFolder:
    return StateFolder.of(deployment, os.environ)


def running_state(deployment: str) -> State:
    """The running deployment of that name; Unreachable when there is none."""
    state = folder_of(deployment).running()
    if state is None:
        raise Unreachable(f"No deployment {deployment!r} runs here: start one with `tgi-orchestrator up`.")
    return state


def plain_url(text: str) -> str:
    """A base URL without a slash at its end; `host:port` counts as http."""
    return (text if "://" in text else f"http://{text}").rstrip("/")
