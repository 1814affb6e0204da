"""The file in the state folder that keeps what `doctor` measured until it is asked again."""

from __future__ import annotations

import json
import os

import structlog

from orchestrator.core.bandwidth import Bandwidths
from orchestrator.deployment.state import StateFolder
from orchestrator.errors import ConfigError

log = structlog.get_logger(__name__)

FILE = "bandwidths.json"


def read_bandwidths(folder: StateFolder) -> Bandwidths | None:
    """None where nothing was measured, or nothing that can be read."""
    try:
        return Bandwidths.from_dict(json.loads((folder.path / FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("bandwidths_not_read", file=FILE, error=str(error))
        return None


def write_bandwidths(folder: StateFolder, bandwidths: Bandwidths) -> None:
    """In one step; ConfigError where the folder cannot be written."""
    folder.create()
    path = folder.path / FILE
    fresh = path.with_suffix(".new")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(bandwidths.to_dict(), file, indent=2)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be written: {error.strerror}.") from None
