"""TGI's Python server as a child process of the shard: started, watched, stopped.

Its output goes to the shard's own log.  It never outlives the shard, see `leash`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import structlog

import tgi_patches
from orchestrator.errors import ConfigError, ShardError
from tgi_patches.contract import EPOCH_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE, ShardSpec

T = TypeVar("T")
log = structlog.get_logger(__name__)

ENTRY = "tgi_patches.entrypoint.text_generation_server"
SOCKET_PATH_BYTES = 107
"""A longer path does not fit into a socket's address."""
POLL_S = 0.05
STOP_GRACE_S = 2.0
"""Less than a launcher gives the shard itself."""
LAST_WORDS_S = 2.0
NOTICE_S = 1.0
"""For work on a server to notice by itself that the server is gone."""
BAD_INPUT = 2
_LAST_LINES = 3
_LINE_CHARS = 300
_CHUNK_BYTES = 64 * 1024
_LEASH = Path(__file__).with_name("leash.py")
_DTYPE_FLAGS = {"bfloat16": "bfloat16", "float16": "float16", "float32": ""}
"""By the spec's name.  TGI's flag knows no float32: that is its default where there is no accelerator."""


class TgiProcess:
    """One rank of a running server; it listens at `uds` with `-<rank>` appended."""

    def __init__(
        self, process: asyncio.subprocess.Process, uds: Path, echo: Callable[[bytes], None], rank: int = 0
    ) -> None:
        self._socket = Path(f"{uds}-{rank}")
        self.pid = process.pid
        self._process = process
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._reading = asyncio.create_task(self._read(echo))
        self._exit = asyncio.create_task(process.wait())

    async def listening(self, deadline_s: float) -> None:
        """Returns once the socket is there.  Raises ShardError, ConfigError where it refused its input."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self._socket.exists():
                    await asyncio.wait([self._exit], timeout=POLL_S)
                    if self._exit.done():
                        raise await self._ended()
        except TimeoutError:
            raise ShardError(f"TGI's server did not listen within {deadline_s:g} s.") from None

    async def while_running(self, work: Awaitable[T]) -> T:
        """The result of `work`; where the process ends meanwhile, its own last words are the error."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # who waits for the server learns it from the connection, and tells others
                await asyncio.wait([task], timeout=NOTICE_S)
            if task.done() and isinstance(task.exception(), ShardError):
                await asyncio.wait([self._exit], timeout=LAST_WORDS_S)  # a server closes before it ends
            if self._exit.done() and not (task.done() and task.exception() is None):
                raise await self._ended()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end and wait for `grace_s`; then whatever is left of its group is forced."""
        self._signal(signal.SIGTERM)
        await asyncio.wait([self._exit], timeout=grace_s)
        self._signal(signal.SIGKILL)
        await asyncio.wait([self._exit], timeout=LAST_WORDS_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def _ended(self) -> ConfigError | ShardError:
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)
        code = self._exit.result()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = " | ".join(self._last) or "it said nothing"
        kind = ConfigError if code == BAD_INPUT else ShardError
        return kind(f"TGI's server ended ({how}): {said}")

    async def _read(self, echo: Callable[[bytes], None]) -> None:
        output = self._process.stdout
        assert output is not None
        rest = b""
        while piece := await output.read(_CHUNK_BYTES):
            echo(piece)
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-_CHUNK_BYTES:]
            self._last.extend(_readable(lines))
        self._last.extend(_readable([rest]))


class TgiServer:
    """All ranks of a running server, which live and end together."""

    def __init__(self, uds: Path, ranks: Sequence[TgiProcess]) -> None:
        self.uds = uds
        self.ranks = tuple(ranks)

    async def listening(self, deadline_s: float) -> None:
        """Returns once every rank listens; raises as TgiProcess does."""
        waiting = [asyncio.create_task(rank.listening(deadline_s)) for rank in self.ranks]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def while_running(self, work: Awaitable[T]) -> T:
        """The result of `work`, or the last words of the rank that ended meanwhile."""
        for rank in self.ranks:
            work = rank.while_running(work)
        return await work


@asynccontextmanager
async def started(spec: ShardSpec, env: dict[str, str], folder: Path) -> AsyncIterator[TgiServer]:
    """The server of `spec`, on sockets in `folder`; gone after the block."""
    uds = folder / "tgi"
    port = _free_port() if spec.tensor_parallel > 1 else 0
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(_rank(spec, env | of_rank(spec, rank, port), uds, rank))
            for rank in range(spec.tensor_parallel)
        ]
        yield TgiServer(uds, ranks)


@asynccontextmanager
async def _rank(spec: ShardSpec, env: Mapping[str, str], uds: Path, rank: int) -> AsyncIterator[TgiProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(_LEASH),
        str(os.getpid()),
        *command(spec, uds),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        process_group=0,  # what tells the shard to stop lets it finish its requests first
    )
    running = TgiProcess(process, uds, _to_stderr, rank)
    log.info("tgi_started", shard=spec.shard, rank=rank, pid=running.pid)
    try:
        yield running
    finally:
        await running.stop()


def command(spec: ShardSpec, uds: Path) -> list[str]:
    """What TGI's launcher would start; ConfigError for a dtype that TGI does not have."""
    try:
        dtype = _DTYPE_FLAGS[spec.dtype]
    except KeyError:
        known = ", ".join(_DTYPE_FLAGS)
        raise ConfigError(f"TGI's server runs in {known}, not in {spec.dtype}.") from None
    return [
        spec.tgi_python,
        "-m",
        ENTRY,
        "serve",
        spec.model,
        "--uds-path",
        str(uds),
        "--max-input-tokens",
        str(spec.max_input_tokens),
        *(("--dtype", dtype) if dtype else ()),
        *(("--sharded",) if spec.tensor_parallel > 1 else ()),
    ]


def of_rank(spec: ShardSpec, rank: int, port: int) -> dict[str, str]:
    """What TGI's launcher tells each rank; they find each other at `port`.  Nothing for a rank alone."""
    if spec.tensor_parallel == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.tensor_parallel),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def environment(spec: ShardSpec, epoch: int, folder: Path, ours: Mapping[str, str]) -> dict[str, str]:
    """`ours` without the deployment's key, what TGI's launcher would set, what the overlay reads.

    `spec.tgi_env` has the last word.  The shard alone talks to other hosts: its servers need no key.

    Only the overlay is put on the interpreter's path: an installed copy of this project lies beside
    packages of other versions than TGI's.
    """
    cores = len(spec.cpus) or len(os.sched_getaffinity(0))
    threads = max(1, cores // spec.tensor_parallel)
    overlay = folder / "path"
    overlay.mkdir()
    (overlay / tgi_patches.__name__).symlink_to(Path(tgi_patches.__path__[0]).resolve())
    env = {
        **{name: value for name, value in ours.items() if name not in (KEY_VARIABLE, KEY_FILE_VARIABLE)},
        "ATTENTION": "flashdecoding-ipex",
        "PREFIX_CACHING": "1" if spec.prefix_caching else "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **spec.to_env(),
        EPOCH_VARIABLE: str(epoch),
        **spec.tgi_env,
    }
    path = (str(overlay), env.get("PYTHONPATH", ""))
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextmanager
def private_folder() -> Iterator[Path]:
    """For the socket and the overlay's path: ours alone, and short enough for a socket's address."""
    longest = "/tgi-orchestrator-12345678/tgi-0"
    where = tempfile.gettempdir()
    if len(os.fsencode(where + longest)) > SOCKET_PATH_BYTES:
        where = "/tmp"
    with tempfile.TemporaryDirectory(prefix="tgi-orchestrator-", dir=where) as folder:
        yield Path(folder)


def _readable(lines: list[bytes]) -> Iterator[str]:
    for line in lines:
        if text := line.decode(errors="replace").strip():
            yield text[:_LINE_CHARS]


def _to_stderr(piece: bytes) -> None:
    sys.stderr.buffer.write(piece)
    sys.stderr.buffer.flush()
