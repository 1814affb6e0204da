"""What a container sees of its arenas and of itself."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tgi_patches.bridge.files import directory_fault
from tgi_patches.contract import OVERLAY_VERSION, PROTOCOL_VERSION, checked_part

MOUNTS = Path("/proc/self/mounts")


def look(arenas: str) -> dict[str, Any]:
    """Facts only; `arenas` is the folder where the shared tmpfs should be."""
    return {
        "user": [os.geteuid(), os.getegid()],
        "arenas": _folder(Path(arenas)),
        "shm_bytes": _space(Path("/dev/shm"))["size_bytes"],
        "python": platform.python_version(),
        "torch": torch_version(),
        "overlay": OVERLAY_VERSION,
        "protocol": PROTOCOL_VERSION,
    }


def sweep(arenas: str, name: str) -> dict[str, Any]:
    """Remove the folder of one measurement."""
    folder = Path(arenas) / checked_part(name, "name")
    shutil.rmtree(folder, ignore_errors=True)
    return {"left": folder.exists()}


def torch_version() -> str:
    """Empty where there is none; it is not imported."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _folder(path: Path) -> Mapping[str, Any]:
    try:
        found = os.lstat(path)
    except OSError as error:
        return {"there": False, "fault": error.strerror}
    return {
        "there": True,
        "kind": mounted_as(path, MOUNTS.read_text(errors="replace")),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mode": f"{stat.S_IMODE(found.st_mode):o}",
        "writable": os.access(path, os.W_OK | os.X_OK),
        "fault": directory_fault(path),
        **_space(path),
    }


def mounted_as(path: Path, mounts: str) -> str:
    """The file system mounted at `path` itself, from /proc/self/mounts; empty for none."""
    kinds = [line.split()[2] for line in mounts.splitlines() if line.split()[1:2] == [str(path)]]
    return kinds[-1] if kinds else ""


def _space(path: Path) -> dict[str, int]:
    try:
        room = os.statvfs(path)
    except OSError:
        return {"size_bytes": 0, "free_bytes": 0}
    return {"size_bytes": room.f_blocks * room.f_frsize, "free_bytes": room.f_bavail * room.f_frsize}
