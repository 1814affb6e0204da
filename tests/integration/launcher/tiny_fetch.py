"""A program that behaves like the one that fetches weights, as far as a launcher can see."""

import json
import sys
import time
from pathlib import Path


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


match sys.argv[1]:
    case "slow":
        for line in ("one", "two"):
            say(line)
            time.sleep(1.2)
        say(json.dumps({"path": "/data/slow", "revision": "r"}))
    case "token":
        read = Path(sys.argv[sys.argv.index("--token-file") + 1]).read_bytes()
        say(json.dumps({"token_bytes": len(read)}))
        time.sleep(1)
    case "bad":
        say("The hub has no model bad.")
        sys.exit(2)
    case "endless":
        time.sleep(600)
