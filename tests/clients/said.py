"""What every client says, and what an answer to it must look like."""

from __future__ import annotations

import json
from typing import Any

PROMPT = "The lighthouse keeper counted the ships every evening. One evening there was one ship too many, and"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who left the harbour?"}]
TOKENS = 6
"""Of every answer: the model ends none of these earlier."""
MODEL = "somebody/a-name-of-their-own"
TOO_LARGE = "x" * 20_001
"""A prompt beyond the payload limit of the deployment."""
LONG = 4000
"""Digits that no machine says within `HURRY`."""
HURRY = {"x-orchestrator-timeout-s": "2"}
LATE = "The request took longer than its own limit."
DIGITS = {"type": "regex", "value": f"[0-9]{{{LONG}}}"}
PLACES, UNITS = ("Oslo", "Rome"), ("celsius", "fahrenheit")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": list(PLACES)}, "unit": {"enum": list(UNITS)}},
            "required": ["place", "unit"],
        },
    },
}
CALL_TOKENS = 120
"""Enough for every call of the tool: its arguments are chosen, not made up."""


def check_call(name: str, arguments: str) -> None:
    """A call of the tool that its schema allows."""
    assert name == "get_weather"
    read = json.loads(arguments)
    assert read.keys() == {"place", "unit"}
    assert read["place"] in PLACES
    assert read["unit"] in UNITS
