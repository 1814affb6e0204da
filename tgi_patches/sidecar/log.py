"""One JSON line per event on stderr, where the container's log collects it.  Never a key or a prompt."""

from __future__ import annotations

import json
import sys
import time


def event(name: str, /, **facts: str | float) -> None:
    """What happened, when, and to which shard or process."""
    line = {"event": name, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts}
    sys.stderr.write(f"{json.dumps(line)}\n")
    sys.stderr.flush()
