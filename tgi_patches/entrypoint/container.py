"""The container's entrypoint: `[--prefill-specialization | --decode-specialization] [launcher's arguments]`

Everything else goes to `text-generation-launcher` as it is.  Exit code 2 for what cannot work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tgi_patches
from tgi_patches.contract import KEY_FILE_VARIABLE, ContractError, ShardSpec, new_epoch
from tgi_patches.entrypoint import processes
from tgi_patches.entrypoint.launch import Launch, Places, launch_of
from tgi_patches.entrypoint.supervise import Command, Patience, supervise
from tgi_patches.key import check_keyed, key_from, open_addresses
from tgi_patches.sidecar import log
from tgi_patches.sidecar.heartbeat import heartbeat_path

LAUNCHER = "text-generation-launcher"
SIDECAR = "tgi_patches.sidecar"
TGI_VENV = "/usr/src/.venv"
"""In TGI's image."""
LDCONFIG_LIMIT_S = 60
_BAD_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    try:
        launch = launch_of(arguments, os.environ, new_epoch(), places())
        if launch.spec is not None:
            hint = f"name the deployment's key in {KEY_FILE_VARIABLE}"
            check_keyed(key_from(os.environ), open_addresses(launch.spec), hint)
        return run(launch)
    except ContractError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_INPUT


def places() -> Places:
    """Our own package's folder; TGI's environment where it is known or stands where TGI's image has it."""
    venv = os.environ.get("VIRTUAL_ENV", TGI_VENV).rstrip("/")
    return Places(str(Path(tgi_patches.__path__[0]).parent), venv if Path(venv, "bin").is_dir() else "")


def run(launch: Launch) -> int:
    """Does not return where there is nothing to supervise."""
    launcher = shutil.which(LAUNCHER, path=launch.env["PATH"])
    if launcher is None:
        raise ContractError(f"There is no {LAUNCHER} on PATH: this is meant for TGI's own image.")
    _refresh_libraries()
    command = (LAUNCHER, *launch.arguments)
    if launch.spec is None or launch.sidecar_env is None:
        processes.as_before_python()
        os.execve(launcher, command, launch.env)
    spec = launch.spec
    _pin(spec)
    log.event("container_starts", deployment=spec.deployment, shard=spec.shard, role=spec.role)
    status = supervise(
        Command(command, launch.env),
        # Isolated: it takes nothing from the folder that we stand in, nor from a user's site.
        Command((sys.executable, "-I", "-m", SIDECAR), launch.sidecar_env),
        heartbeat_path(Path(spec.arena_dir), spec.deployment, spec.shard),
        Patience(),
    )
    return processes.end_as(status)


def _refresh_libraries() -> None:
    """As TGI's entrypoint does: the container runtime has mounted the driver's libraries since the build."""
    if os.getpid() == 1 and (ldconfig := shutil.which("ldconfig")):
        try:
            subprocess.run([ldconfig], stderr=subprocess.DEVNULL, timeout=LDCONFIG_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"The cache of libraries is as old as the image: {error}.\n")


def _pin(spec: ShardSpec) -> None:
    if not spec.cpus:
        return
    try:
        os.sched_setaffinity(0, spec.cpus)
    except OSError:
        raise ContractError(
            f"The CPU cores {', '.join(map(str, spec.cpus))} are not all usable here."
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
