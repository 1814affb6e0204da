"""Which arenas can be read directly: all shards that find the same id in their arena directory.

A host name or a path would not tell: two containers may mount one tmpfs under two names, or two under one.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.files import DIRECTORY_MODE, FILE_MODE, directory_fault

NAME = "arena-id"
_ID = re.compile(rb"[0-9a-f]{32}\n?")
_READ_BYTES = 64
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def arena_id(directory: Path) -> str:
    """32 hex digits that are the same for everybody who asks about this directory, for as long as it lives.

    The first one to ask makes the directory and the id.  Raises ArenaError.
    """
    path = directory / NAME
    try:
        _make_directory(directory)
        if fault := directory_fault(directory):
            raise ArenaError(fault)
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise ArenaError(f"The arena id {path} cannot be made or read: {error.strerror}.") from None


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        return
    directory.chmod(DIRECTORY_MODE)


def _make(path: Path) -> None:
    """Of all who try at once, the first to link its own file wins, and nobody sees a file without an id."""
    mine = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(mine, _NEW, FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, FILE_MODE)  # whatever the umask is, shards of other users must be able to read it
            file.write(secrets.token_hex(16).encode() + b"\n")
        path.hardlink_to(mine)
    except FileExistsError:
        pass
    finally:
        mine.unlink()


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        raw = file.read(_READ_BYTES) if stat.S_ISREG(found.st_mode) else b""
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not _ID.fullmatch(raw):
        raise ArenaError(f"The file {path} holds no arena id: remove it while no shard runs.")
    return raw.decode().strip()
