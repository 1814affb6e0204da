"""The container's command line: our two flags out, everything else for TGI's launcher as it stands.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tgi_patches.contract import ContractError, Role

FLAGS = {"--prefill-specialization": Role.PREFILL, "--decode-specialization": Role.DECODE}


def split(arguments: Sequence[str]) -> tuple[Role | None, tuple[str, ...]]:
    """(the role of our flag, the launcher's arguments in order).  Raises ContractError."""
    roles = {FLAGS[argument] for argument in arguments if argument in FLAGS}
    if len(roles) > 1:
        raise ContractError(f"Give one of {' and '.join(FLAGS)}, not both.")
    rest = tuple(argument for argument in arguments if argument not in FLAGS)
    return next(iter(roles), None), rest


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """What the launcher reads for its flag `name`, `--flag value` or `--flag=value`; None without it."""
    value = None
    for argument, after in pairwise((*arguments, "")):
        if argument == name:
            value = after
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value
