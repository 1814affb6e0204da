"""The arena files of a deployment, seen from outside: is there room for them, and their removal.

Shards create and use them; this module knows only where they stand.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

FILES = "*.arena"
ARENA_ID = "arena-id"
"""By which shards know that they share the folder."""
BESIDE = ("*.report", "*.report-new", "*.mailbox")
"""What the server and the sidecar of a TGI shard tell each other; each shard removes its own."""


def free_bytes(directory: Path) -> int:
    """Free bytes of the file system on which `directory` is, or would be."""
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    room = os.statvfs(existing)
    return room.f_bavail * room.f_frsize


def _written(path: Path) -> bool:
    """True while a shard holds the file's lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def remove_arenas(directory: Path, deployment: str, *, keep_id: bool = False) -> None:
    """Remove the deployment's arena files, what stands beside them, and the folders that are empty then.

    A file whose writer lives is somebody else's: state folders differ, arenas of a name do not.
    `keep_id`: shards without a file of their own may go on in this folder.
    """
    folder = directory / deployment
    for path in folder.glob(FILES):
        if not _written(path):
            path.unlink(missing_ok=True)
    if not any(folder.glob(FILES)):
        for path in (path for pattern in BESIDE for path in folder.glob(pattern)):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    if not keep_id and [path.name for path in directory.glob("*")] == [ARENA_ID]:
        (directory / ARENA_ID).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
