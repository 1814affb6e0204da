"""Secrets as files in a container: copied in before it starts, in no environment, label or log."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath

from orchestrator.errors import ConfigError
from orchestrator.shards.docker.names import SECRETS

TOKEN_FILE = "hub-token"
"""Name of the file with the hub's token, where one is needed."""
_FOLDER_MODE = 0o500
_FILE_MODE = 0o400


def archive(files: Mapping[str, bytes], owner: tuple[int, int]) -> bytes:
    """A tar to be unpacked at the root of a container: only user `owner[0]` can read the files."""
    folder = PurePosixPath(SECRETS).relative_to("/")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(_entry(str(folder), owner, _FOLDER_MODE, tarfile.DIRTYPE))
        for name, content in files.items():
            entry = _entry(str(folder / name), owner, _FILE_MODE, tarfile.REGTYPE)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def owner_of(user: str, image: str) -> tuple[int, int]:
    """(uid, gid) of `uid`, `uid:gid` or empty for root; ConfigError for a name: only the image knows it."""
    uid, _, gid = user.partition(":")
    if not all(part.isdecimal() for part in (uid or "0", gid or "0")):
        raise ConfigError(
            f"The image {image} runs as {user!r}: the user must be a number, so that files can be its own."
        )
    # The engine takes group 0 too where a user that it does not know comes without one.
    return int(uid or 0), int(gid or 0)


def _entry(name: str, owner: tuple[int, int], mode: int, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    entry.uid, entry.gid = owner
    return entry
