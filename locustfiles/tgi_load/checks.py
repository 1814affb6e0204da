"""Options that cannot work, in a sentence; and where the API key comes from."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

WEIGHTS = "chat=6,code=3,long=1"
KEY_VARIABLE = "LOAD_API_KEY"


class LoadError(Exception):
    """One sentence for the user; exit code 2."""


def checked(options: Namespace) -> None:
    """Raises LoadError."""
    above_zero = ("slo_ttft_ms", "slo_tpot_ms", "length_scale", "max_answer_tokens", "burst_period_s",
                  "day_length_s", "ramp_step_users", "ramp_step_s", "connect_timeout_s",
                  "idle_timeout_s")  # fmt: skip
    for name in above_zero:
        if not getattr(options, name) > 0:
            raise LoadError(f"--{name.replace('_', '-')} must be above 0.")
    if options.think_s < 0 or options.burst_base_users < 0:
        raise LoadError("--think-s and --burst-base-users must be 0 or more.")
    if not 0 <= options.burst_length_s <= options.burst_period_s:
        raise LoadError("--burst-length-s must be between 0 and --burst-period-s.")
    weights(options.weights)


def weights(text: str) -> dict[str, int]:
    """Of `chat=6,code=3,long=1`; what is not named has none.  Raises LoadError."""
    found = {"chat": 0, "code": 0, "long": 0}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        if name not in found or not number.isdecimal():
            raise LoadError(f"--weights {text!r} is not like {WEIGHTS}.")
        found[name] = int(number)
    if not any(found.values()):
        raise LoadError("--weights leaves no user.")
    return found


def api_key(options: Namespace) -> str | None:
    """From the file, else from the environment.  Raises LoadError."""
    if not options.api_key_file:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(options.api_key_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise LoadError(f"--api-key-file {options.api_key_file} cannot be read: {error}.") from error
    if not key or not key.isprintable():
        raise LoadError(f"--api-key-file {options.api_key_file} holds no key on one line.")
    return key
