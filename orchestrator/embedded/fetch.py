"""Fetches a model into a cache and ends: `python -m orchestrator.embedded.fetch MODEL --cache FOLDER`

Lines on stdout: sentences, `{"done_bytes", "total_bytes", "file"}` once a second while something comes,
and at the end `{"path", "name", "revision", "dtype_hint"}`.  A model that cannot be had: a sentence, code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.embedded.weights import resolve_model
from orchestrator.errors import OrchestratorError

EVERY_S = 1.0

Say = Callable[[str], None]


def main(arguments: Sequence[str], say: Say) -> int:
    order = _order(arguments)
    growth = Growth(say)
    try:
        model = resolve_model(
            order.model, order.revision, order.cache, order.token_file, say, sized=growth.begin
        )
    except OrchestratorError as error:
        growth.end()
        say(str(error))
        return error.exit_code
    growth.end()
    say(json.dumps(dataclasses.asdict(model) | {"path": str(model.path)}))
    return 0


class Growth:
    """Says how many bytes of a download have come, by the size of the folder that it goes into."""

    def __init__(self, say: Say, every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path, total_bytes: int) -> None:
        before = size_of(folder)
        self._thread = threading.Thread(target=self._watch, args=(folder, before, total_bytes), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """What was said by then is the last."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, folder: Path, before: int, total_bytes: int) -> None:
        while not self._over.wait(self._every_s):
            done = min(size_of(folder) - before, total_bytes)
            told = {"done_bytes": done, "total_bytes": total_bytes, "file": newest(folder)}
            self._say(json.dumps(told))


def size_of(folder: Path) -> int:
    """Bytes of the files below it; a link counts nothing."""
    return sum(size for _, _, size in _files(folder))


def newest(folder: Path) -> str:
    """Name of the file below it that was written last; empty for none."""
    return max(((changed, name) for changed, name, _ in _files(folder)), default=(0.0, ""))[1]


def _files(folder: Path) -> list[tuple[float, str, int]]:
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                told = path.stat()
                found.append((told.st_mtime, path.name, told.st_size))
        except OSError:
            continue  # it was renamed a moment ago: its bytes are counted next time
    return found


def _order(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.embedded.fetch", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--revision")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--token-file", type=Path)
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _say))
