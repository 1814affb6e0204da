"""The images' health check: asks what runs in this container whether it is well.  Standard library only.

`health.py [URL]`.  Without a URL: a shard's own port, by its launch order; else the gateway of the state
file.  Exit code 0, or 1 with a sentence.
"""

import json
import os
import ssl
import sys
import urllib.request
from pathlib import Path

LIMIT_S = 4.0


def url_here(env: os._Environ[str] | dict[str, str]) -> str:
    """LookupError when nothing of ours has said where it listens."""
    if spec := env.get("ORCHESTRATOR_SHARD_SPEC"):
        return f"http://127.0.0.1:{json.loads(spec)['port']}/health"
    states = Path(env.get("XDG_STATE_HOME", "/var/lib"), "tgi-orchestrator").glob("*/state.json")
    newest = max(states, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise LookupError("Nothing has started here yet.")
    return f"{json.loads(newest.read_text())['url']}/health"


def main(arguments: list[str]) -> int:
    try:
        url = arguments[0] if arguments else url_here(os.environ)
        # Of this container itself: who signed its certificate is no question of health.
        trusting = ssl._create_unverified_context() if url.startswith("https:") else None
        ours = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            *([urllib.request.HTTPSHandler(context=trusting)] if trusting else []),
        )
        with ours.open(url, timeout=LIMIT_S):
            return 0
    except (OSError, ValueError, LookupError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
