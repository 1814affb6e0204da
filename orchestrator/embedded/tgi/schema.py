"""Reads the description of TGI's messages from the package that an interpreter has installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

from orchestrator.errors import ConfigError

DEADLINE_S = 60.0
KILL_DEADLINE_S = 5.0
_SCRIPT = (
    "import sys; from text_generation_server.pb import generate_pb2; "
    "sys.stdout.buffer.write(generate_pb2.DESCRIPTOR.serialized_pb)"
)


async def read_schema(
    python: str, env: Mapping[str, str] = os.environ, *, deadline_s: float = DEADLINE_S
) -> bytes:
    """A serialized FileDescriptorProto; ConfigError in a sentence where `python` has no TGI server."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            _SCRIPT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
        )
    except FileNotFoundError:
        raise ConfigError(f"The interpreter {python} of tgi.python does not exist.") from None
    except OSError as error:
        raise ConfigError(
            f"The interpreter {python} of tgi.python cannot be run: {error.strerror}."
        ) from None
    try:
        async with asyncio.timeout(deadline_s):
            schema, said = await process.communicate()
    except TimeoutError:
        raise ConfigError(
            f"The interpreter {python} of tgi.python did not import TGI's messages within {deadline_s:g} s."
        ) from None
    finally:
        await _ended(process)
    if process.returncode != 0 or not schema:
        lines = said.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        raise ConfigError(f"The interpreter {python} of tgi.python has no TGI server: {last}.")
    return schema


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Nothing is left of it, whatever kept it from ending."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_DEADLINE_S)
