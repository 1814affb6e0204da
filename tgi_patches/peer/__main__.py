"""`python -m tgi_patches.peer look|serve|measure '{...}'`; answers are lines of JSON on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def main() -> None:
    what, told = sys.argv[1], json.loads(sys.argv[2])
    if what == "look":
        from tgi_patches.peer.look import look

        say(look(told["arenas"]))
    elif what == "sweep":
        from tgi_patches.peer.look import sweep

        say(sweep(told["arenas"], told["name"]))
    elif what == "serve":
        from tgi_patches.peer.serve import End, serve

        asyncio.run(serve(End(**told), say))
    elif what == "measure":
        from tgi_patches.peer.measure import Wanted, measure

        say(asyncio.run(measure(Wanted(**told))))
    else:
        sys.exit(f"There is no {what!r}: look, serve, measure or sweep.")


def say(answer: dict[str, Any]) -> None:
    """One line; the reader may be there already."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
