"""`shard`: one shard in the foreground, for a deployment whose conductor is on another host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from orchestrator.config import Loaded
from orchestrator.deployment.arena import remove_arenas
from orchestrator.deployment.key import key_env
from orchestrator.deployment.plan import WantedShard
from orchestrator.deployment.progress import for_terminal
from orchestrator.deployment.start import planned
from orchestrator.errors import ConfigError
from orchestrator.shards.process import SHARD_COMMAND, running_of, shard_environment
from tgi_patches.contract import ContractError, Role, ShardSpec, checked_shard
from tgi_patches.key import check_keyed, key_from, listen_address

STOP_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shard listens."""

    host: str
    """Without the brackets of IPv6."""
    port: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Address:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{flag} must look like 10.0.0.1:3001, not {text!r}.")
        return cls(host.strip("[]"), int(port))


def wanted_shard(role: str, listen: str, name: str | None, cpus: str | None) -> WantedShard:
    """ConfigError in a sentence that names the flag."""
    if role not in list(Role):
        raise ConfigError(f"--role must be prefill, decode or mixed, not {role!r}.")
    address = Address.parse("--listen", listen)
    try:
        cores = tuple(int(core) for core in cpus.split(",")) if cpus else ()
    except ValueError:
        raise ConfigError(f"--cpus must look like 0,1, not {cpus!r}.") from None
    name = f"{role}-0" if name is None else _checked_name(name, Role(role))
    return WantedShard(Role(role), name, address.host, address.port, cores)


def _checked_name(name: str, role: Role) -> str:
    try:
        return checked_shard(name, pulls=role is Role.DECODE)
    except ContractError as error:
        raise ConfigError(f"--name: {error}") from None


def run_shard(loaded: Loaded, wanted: WantedShard) -> None:
    """Serve until SIGTERM or SIGINT; exit code and last words are the shard's own."""
    key = key_env(loaded, os.environ)
    _check_key(loaded, wanted, key)
    progress = for_terminal()
    try:
        progress.step("Looking for the model")
        plan = planned(loaded, progress, wanted)
        (spec,) = plan.specs
        progress.done(f"Shard {spec.shard} of {spec.deployment} will answer at {running_of(spec).url}")
    finally:
        progress.close()
    try:
        code = asyncio.run(_until_ended(spec, key))
    finally:
        remove_arenas(Path(spec.arena_dir), spec.deployment, keep_id=True)
    if code:
        raise typer.Exit(code)


def _check_key(loaded: Loaded, wanted: WantedShard, key: dict[str, str]) -> None:
    addresses = [(wanted.host, wanted.port)]
    if listen := loaded.settings.arena.pull_listen:
        addresses.append(listen_address(listen))
    check_keyed(key_from(key), addresses, "name the deployment's key with --key-file")


async def _until_ended(spec: ShardSpec, key: dict[str, str]) -> int:
    """The exit code; 0 for a shard that ended because it was told to."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    process = await asyncio.create_subprocess_exec(
        *SHARD_COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        env=shard_environment(spec) | key,
        process_group=0,
    )
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(_stopped(process, asked))
        code = await process.wait()
        stopping.cancel()
    return 0 if asked.is_set() else code if code >= 0 else 1


async def _stopped(process: asyncio.subprocess.Process, asked: asyncio.Event) -> None:
    """Once asked: the shard is told to end, and forced to after a while."""
    await asked.wait()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        await asyncio.sleep(STOP_LIMIT_S)
