"""vLLM's router, a Rust program from PyPI, in prefill-decode mode with static shards.

It needs a virtual environment of its own only for its dependencies' sake; the command on PATH is enough.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from orchestrator.bench.gateway.peers.missing import Missing

COMMAND_VARIABLE = "BENCH_VLLM_ROUTER"
"""Names the command where it is not on PATH."""
COMPARED_VERSION = "0.1.17"


def binary() -> str:
    """Raises Missing."""
    found = shutil.which(os.environ.get(COMMAND_VARIABLE) or "vllm-router")
    if found is None:
        raise Missing(
            f"`pip install vllm-router=={COMPARED_VERSION}`, best in a virtual environment of its own, and "
            f"put the command vllm-router on PATH or name it in {COMMAND_VARIABLE}"
        )
    return found


def version() -> str:
    """Raises Missing."""
    first = Path(binary()).read_bytes().partition(b"\n")[0]
    interpreter = first[2:].decode("utf-8", "replace").strip() if first.startswith(b"#!") else ""
    if not interpreter:
        return "unknown"
    asked = "import json, importlib.metadata as m; print(json.dumps(m.version('vllm-router')))"
    said = subprocess.run(
        [interpreter, "-c", asked], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    try:
        return str(json.loads(said))
    except json.JSONDecodeError:
        return "unknown"


def command(port: int, metrics_port: int, prefill: str, decode: str) -> list[str]:
    """Raises Missing."""
    return [
        binary(),
        *("--host", "127.0.0.1", "--port", str(port)),
        "--vllm-pd-disaggregation",
        *("--prefill", prefill, "--decode", decode),
        *("--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--log-level", "warning"),
    ]
