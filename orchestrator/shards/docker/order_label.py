"""The launch order as a container's label has it, with the version of its form.  Pure."""

from __future__ import annotations

import json

from orchestrator.core.order import ShardOrder
from tgi_patches.contract import ContractError

VERSION = 1
"""Of the label; a container with another one is somebody else's to us."""


def written(order: ShardOrder) -> str:
    return json.dumps({"version": VERSION, **order.to_dict()})


def read(text: str) -> ShardOrder | None:
    """None for what we did not write, or wrote in another version."""
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            return None
        return ShardOrder.from_dict(raw)
    except (ValueError, TypeError, AttributeError, ContractError):
        return None
