"""What a user reads when a deployment is ready: where it is, and what to try next."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from orchestrator.core.ticket import EMBEDDED
from orchestrator.deployment.state import State
from tgi_patches.contract import Role

PROGRAM = "tgi-orchestrator"
QUESTION = {
    "model": "tgi",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "temperature": 0,
    "stream": True,
}


def facts(state: State) -> dict[str, Any]:
    """For `--json`."""
    return {
        "deployment": state.deployment,
        "url": state.url,
        "pid": state.pid,
        "model": state.model_name,
        "dtype": state.dtype,
        "engine": engine_of(state),
        "shards": [spec.shard for spec in state.specs],
        "logs": dict(state.logs),
    }


def engine_of(state: State) -> str:
    """`embedded`, or `TGI` where the shards drive TGI's server."""
    return "TGI" if state.specs[0].tgi_python else EMBEDDED


def banner(state: State, *, detached: bool) -> str:
    """Several lines; the curl line can be pasted as it is."""
    program = _program()
    name = "" if state.deployment == "default" else f" -d {state.deployment}"
    last = state.specs[-1].shard
    paired = {Role.PREFILL, Role.DECODE} <= {spec.role for spec in state.specs}
    proof = [(f"{program} verify{name}", "proves that the pair answers exactly as one shard does")]
    tries = [
        (f"{program} status{name}", "shards, and what is promised on them"),
        (f"{program} bench interference --quick", "what mixing the phases costs on this machine"),
        *(proof if paired else []),
        (f"{program} logs {last} -f{name}", "what a shard writes"),
        (f"{program} down{name}" if detached else "Ctrl-C", "stops everything"),
    ]
    width = max(len(command) for command, _ in tries)
    shards = ", ".join(spec.shard for spec in state.specs)
    engine = "" if engine_of(state) == EMBEDDED else f" on {engine_of(state)}'s own server"
    return "\n".join(
        (
            f"\nReady: {state.url} serves {state.model_name} in {state.dtype}{engine} ({shards}).\n",
            "Ask it something:",
            f"  {curl_line(state.url, tls=bool(state.tls_cert), api_keys=state.api_keys)}\n",
            "Then try:",
            *(f"  {command:<{width}}  {what}" for command, what in tries),
        )
    )


def curl_line(url: str, *, tls: bool = False, api_keys: bool = False) -> str:
    """A streaming chat request; greedy, so that everybody gets the same answer."""
    body = json.dumps(QUESTION)
    # Its names are those under which clients come; we ask at an address.
    trust = " -k" if tls else ""
    key = ' -H "Authorization: Bearer $API_KEY"' if api_keys else ""
    return f"curl -N{trust} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def _program() -> str:
    """The command as it can be typed here: by name when it is on PATH, else by its path."""
    if shutil.which(PROGRAM):
        return PROGRAM
    beside = Path(sys.executable).with_name(PROGRAM)
    if not beside.exists():
        return f"{sys.executable} -m orchestrator.cli"
    return min(os.path.relpath(beside), str(beside), key=len)
