"""One line per event: its name and its facts.  Never a key, a prompt or a token."""

from __future__ import annotations

import json
import logging

_LOGGER = logging.getLogger("tgi_patches.pull")


def warn(name: str, /, **facts: str | float) -> None:
    """What somebody should look at."""
    _LOGGER.warning("%s %s", name, json.dumps(facts))


def info(name: str, /, **facts: str | float) -> None:
    """What happens in the course of things."""
    _LOGGER.info("%s %s", name, json.dumps(facts))
