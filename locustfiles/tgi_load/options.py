"""Command-line options of these locustfiles; each has an environment variable."""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

from locust.argument_parser import LocustArgumentParser

from .checks import KEY_VARIABLE, WEIGHTS

Group: TypeAlias = argparse._ArgumentGroup
SHAPES = ("steady", "burst", "day", "ramp")


def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """Listener of `init_command_line_parser`."""
    _add_objectives(parser.add_argument_group("TGI load: objectives and report"))
    _add_traffic(parser.add_argument_group("TGI load: traffic"))
    _add_shapes(parser.add_argument_group("TGI load: shapes"))
    _add_connection(parser.add_argument_group("TGI load: connection"))


def _add_objectives(group: Group) -> None:
    _number(group, "--slo-ttft-ms", 1000.0, "TTFT objective of goodput and of the shape `ramp`.")
    _number(group, "--slo-tpot-ms", 100.0, "TPOT objective of goodput.")
    _flag(group, "--tolerate-refusals", "Refusals (429) are no errors: exit code 0.")
    _flag(group, "--honour-retry-after", "A user that was refused waits as long as the server asks.")
    _flag(group, "--by-route", "Separate rows in Locust's tables for separated and mixed requests.")
    _add(group, "--report-dir", "Folder for summary.txt and summary.json.", page=False, default="")


def _add_traffic(group: Group) -> None:
    _number(group, "--think-s", 1.0, "Mean pause of a user between two requests (exponential).")
    _number(group, "--length-scale", 1.0, "Factor on the mean lengths of prompts and answers.")
    _number(group, "--max-answer-tokens", 1024, "Upper bound of max_new_tokens.")
    _number(group, "--seed", 1, "Seed of lengths and texts.")
    text = f"Shares of the users in mixed.py. Default {WEIGHTS}."
    _add(group, "--weights", text, page=False, default=WEIGHTS)


def _add_shapes(group: Group) -> None:
    text = "steady: --users all the time; the others vary up to --users. Default steady."
    _add(group, "--shape", text, page=False, choices=SHAPES, default=SHAPES[0])
    _number(group, "--burst-base-users", 1, "burst: users between the bursts.")
    _number(group, "--burst-period-s", 60.0, "burst: from the end of one burst to the end of the next.")
    _number(group, "--burst-length-s", 10.0, "burst: length of a burst.")
    _number(group, "--day-length-s", 240.0, "day: length of the compressed day.")
    _number(group, "--ramp-step-users", 2, "ramp: users that a step adds.")
    _number(group, "--ramp-step-s", 20.0, "ramp: length of a step.")


def _add_connection(group: Group) -> None:
    key = f"File with the API key, on one line; else the variable {KEY_VARIABLE}."
    _add(group, "--api-key-file", key, page=False, default="")
    text = "PEM file to verify the server's certificate with."
    _add(group, "--ca-file", text, page=False, default="")
    text = "Do not verify the server's certificate."
    _add(group, "--insecure", text, page=False, action="store_true")
    _number(group, "--connect-timeout-s", 10.0, "Limit of a connection's start.")
    _number(group, "--idle-timeout-s", 120.0, "Limit of a pause in an answer, the first token included.")


def _add(group: Group, name: str, text: str, page: bool = True, **how: Any) -> None:
    """`page`: Locust's page shows it too."""
    variable = "LOAD_" + name.removeprefix("--").replace("-", "_").upper()
    action: Any = group.add_argument(name, help=text, env_var=variable, **how)
    # Locust sets these itself on what is added to the parser, and forgets groups.
    action.include_in_web_ui = page
    action.is_secret = action.is_required = action.is_multiple = False


def _number(group: Group, name: str, default: float, text: str) -> None:
    _add(group, name, f"{text} Default {default:g}.", type=type(default), default=default)


def _flag(group: Group, name: str, text: str) -> None:
    _add(group, name, text, action="store_true")
