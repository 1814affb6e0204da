"""What the image's HEALTHCHECK runs: asks the sidecar, or TGI's router in a container without one.

Exit code 0 and nothing, or 1 and a sentence.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tgi_patches.contract import SPEC_VARIABLE
from tgi_patches.entrypoint.flags import value_of
from tgi_patches.entrypoint.launch import TGI_PORT

DEADLINE_S = 4.0
_ANSWER_BYTES = 4096
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def address(env: Mapping[str, str], arguments: Sequence[str]) -> tuple[str, int]:
    """(host, port) to ask, from a container's environment and its entrypoint's arguments.

    Raises ValueError for what is no port.
    """
    if SPEC_VARIABLE in env:
        spec = json.loads(env[SPEC_VARIABLE])
        host = spec.get("host", "127.0.0.1")
        return _EVERY_ADDRESS.get(host, host), int(spec["sidecar_port"])
    return "127.0.0.1", int(value_of(arguments, "--port") or env.get("PORT") or TGI_PORT)


def ask(host: str, port: int) -> str:
    """Empty for a 200, else a sentence."""
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said = answer.read(_ANSWER_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"Nothing answers at {host}:{port}: {error}."
    finally:
        connection.close()
    return "" if answer.status == http.client.OK else said or f"Status {answer.status}."


def main() -> int:
    try:
        arguments = Path("/proc/1/cmdline").read_text().split("\0")
        fault = ask(*address(os.environ, arguments))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        fault = f"It is not known where to ask: {error!r}."
    sys.stdout.write(fault)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
