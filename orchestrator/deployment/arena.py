"""The arena files of a deployment, seen from outside: is there room for them, and their removal.

Shards create and use them; this module knows only where they stand.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILES = "*.arena"


def free_bytes(directory: Path) -> int:
    """Free bytes of the file system on which `directory` is, or would be."""
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    room = os.statvfs(existing)
    return room.f_bavail * room.f_frsize


def remove_arenas(directory: Path, deployment: str) -> None:
    """Remove the deployment's arena files and the folders that are empty then."""
    folder = directory / deployment
    for path in folder.glob(FILES):
        path.unlink(missing_ok=True)
    for empty in (folder, directory):
        with contextlib.suppress(OSError):
            empty.rmdir()
