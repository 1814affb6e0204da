"""Arena files on a tmpfs: who may own them, how they are created, locked and mapped.

The writer creates and locks, readers only open.  A file is never truncated (its readers would die
of SIGBUS): one that does not fit any more is unlinked and made anew under another inode.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

from tgi_patches.bridge import ArenaError, Place
from tgi_patches.bridge.layout import HEADER_BYTES, MAGIC, VERSION, ArenaLayout, Word
from tgi_patches.contract import BridgeMiss, MissReason, checked_part

DIRECTORY_MODE = 0o2770
"""Owner and group; setgid, so that files of shards under other users stay in the group."""
FILE_MODE = 0o640

_ATTEMPTS = 4
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Mapping:
    """One mapped arena: `data` its bytes, `words` header and index as 64-bit words."""

    __slots__ = ("_mmap", "data", "layout", "pinned", "ring", "words")

    def __init__(self, fd: int, layout: ArenaLayout, *, writable: bool) -> None:
        self.layout = layout
        self._mmap = mmap.mmap(
            fd,
            layout.file_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        )
        self.data = memoryview(self._mmap)
        self.ring = self.data[layout.ring_offset : layout.pinned_offset]
        self.pinned = self.data[layout.pinned_offset :]
        self.words = self.data[: layout.ring_offset].cast("Q")

    def find(self, key: bytes, start: int) -> int:
        """Offset of `key` in the key table at or after `start`; -1 for none."""
        return self._mmap.find(key, start, self.layout.key_offset(self.layout.slots))

    def record(self, place: Place, size: int) -> memoryview:
        """The first `size` bytes of the record that lies at `place`."""
        if place.pinned:
            return self.pinned[place.position : place.position + size]
        start = place.position % self.layout.ring_bytes
        return self.ring[start : start + size]

    def close(self) -> None:
        """Unmap; where a traceback still holds a slice, the memory goes with that."""
        for view in (self.words, self.ring, self.pinned, self.data):
            view.release()
        with contextlib.suppress(BufferError):
            self._mmap.close()


def arena_path(directory: Path, deployment: str, shard: str, rank: int) -> Path:
    """`<directory>/<deployment>/<shard>.<rank>.arena`"""
    folder = checked_part(deployment, "deployment name")
    return directory / folder / f"{checked_part(shard, 'shard name')}.{rank}.arena"


def make_directories(path: Path) -> None:
    """The arena directory and the deployment's in it, of this writer's own making or already safe."""
    for folder in (path.parent.parent, path.parent):
        try:
            folder.mkdir(DIRECTORY_MODE)
        except FileExistsError:
            pass
        except OSError as error:
            raise ArenaError(f"The arena directory {folder} cannot be made: {error.strerror}.") from None
        else:
            folder.chmod(DIRECTORY_MODE)
        if fault := directory_fault(folder):
            raise ArenaError(fault)


def directory_fault(folder: Path) -> str | None:
    """One sentence when arenas must not live in `folder`; None when they may."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return f"The arena directory {folder} is not a directory (links are not followed)."
    if found.st_mode & stat.S_IWOTH:
        return f"The arena directory {folder} is writable by everyone: name one of its own below it."
    shared = found.st_mode & stat.S_IRWXG == stat.S_IRWXG and found.st_gid in (os.getegid(), *os.getgroups())
    if found.st_uid not in (0, os.geteuid()) and not shared:
        return f"The arena directory {folder} belongs to user {found.st_uid} and not to a group of ours."
    return None


def open_for_writing(path: Path, layout: ArenaLayout) -> int:
    """A locked descriptor of a file that is allocated to `layout.file_bytes`: reused if it fits, else new.

    The lock lasts as long as the descriptor.  Raises ArenaError.
    """
    for _ in range(_ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, FILE_MODE)
        except OSError as error:
            raise ArenaError(f"The arena {path} cannot be opened: {_reason(error)}.") from None
        try:
            if _locked(fd, path) and _allocated(fd, path, layout):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise ArenaError(f"The arena {path} is being replaced by others all the time.")


def unlock(fd: int) -> None:
    """Let the next writer in, though a mapping may still hold the file open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def open_for_reading(path: Path) -> int:
    """A descriptor of another shard's arena.  Raises BridgeMiss: MISSING, ERROR."""
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        raise BridgeMiss(MissReason.MISSING, f"no arena {path.name}") from None
    except OSError as error:
        raise BridgeMiss(MissReason.ERROR, f"arena {path.name}: {_reason(error)}") from None
    try:
        fault = (
            directory_fault(path.parent.parent)
            or directory_fault(path.parent)
            or _file_fault(path, os.fstat(fd), os.lstat(path.parent).st_gid)
        )
    except OSError as error:
        fault = _reason(error)
    if fault:
        os.close(fd)
        raise BridgeMiss(MissReason.ERROR, fault)
    return fd


def read_layout(fd: int) -> ArenaLayout | None:
    """The geometry in a file's header; None if the file is not a complete arena of this version."""
    header = os.pread(fd, HEADER_BYTES, 0)
    if len(header) < HEADER_BYTES:
        return None
    words = memoryview(header).cast("Q")
    layout = ArenaLayout(words[Word.RING_BYTES], words[Word.INDEX_SLOTS], words[Word.PINNED_BYTES])
    known = words[Word.MAGIC] == MAGIC and words[Word.VERSION] == VERSION
    return layout if known and os.fstat(fd).st_size == layout.file_bytes else None


def _locked(fd: int, path: Path) -> bool:
    """True when this process alone writes the file that stands at `path`; False when it was replaced."""
    if fault := _file_fault(path, os.fstat(fd), None):
        raise ArenaError(fault)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaError(f"Another process writes the arena {path}: give this shard another name.") from None
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _allocated(fd: int, path: Path, layout: ArenaLayout) -> bool:
    """True when the file has its full size in memory; False when an unfitting one was unlinked."""
    found = os.fstat(fd)
    if found.st_size == 0:
        os.fchmod(fd, FILE_MODE)
        _allocate(fd, path, layout.file_bytes)
        return True
    if read_layout(fd) == layout and found.st_blocks * 512 >= layout.file_bytes:
        return True
    path.unlink()
    return False


def _allocate(fd: int, path: Path, size_bytes: int) -> None:
    space = os.fstatvfs(fd)
    free_bytes = space.f_bavail * space.f_frsize
    if space.f_blocks and free_bytes < size_bytes:  # a tmpfs without a limit shows 0 blocks
        path.unlink()
        raise ArenaError(_too_small(path, size_bytes, free_bytes))
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        path.unlink()
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise ArenaError(_too_small(path, size_bytes, free_bytes)) from None
        raise ArenaError(f"The arena {path} cannot be allocated: {_reason(error)}.") from None


def _too_small(path: Path, size_bytes: int, free_bytes: int) -> str:
    return (
        f"An arena of {_mebibytes(size_bytes)} does not fit into {path.parent.parent}, "
        f"where {_mebibytes(free_bytes)} are free: ask for a smaller arena or enlarge that tmpfs."
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _file_fault(path: Path, found: os.stat_result, shared_gid: int | None) -> str | None:
    """One sentence when a file is not to be trusted.

    It belongs to us or, for reading, to root or to the group that shares the directory.
    """
    if not stat.S_ISREG(found.st_mode):
        return f"The arena {path} is not a regular file."
    ours = found.st_uid == os.geteuid()
    if not ours and (shared_gid is None or (found.st_uid != 0 and found.st_gid != shared_gid)):
        return f"The arena {path} belongs to user {found.st_uid}."
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"The arena {path} is writable by others than its owner."
    return None


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return os.strerror(error.errno or 0)
