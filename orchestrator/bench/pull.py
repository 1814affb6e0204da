"""What a record costs from one host to another: our pull beside sockets, memory and what others use.

Ways take turns within a round and report medians of wall time, from the first call to the last byte;
a pull's includes greeting, proofs, every checksum and publishing.  Connections are new each time, but
for gloo and nixl, which keep theirs.  Each round's record is new and lies in the sender's arena.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from orchestrator.bench.pull_others import Gloo, Nixl, NotHere
from orchestrator.bench.pull_peer import (
    FINGERPRINT,
    KEY,
    RECORD_TTL_S,
    RING_RECORDS,
    memory,
    planes_of,
    tokens_of,
)
from orchestrator.errors import ConfigError
from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import PROTOCOL_VERSION, PullRequest, new_epoch, new_handle
from tgi_patches.key import sign
from tgi_patches.pull.puller import Puller

Way = Callable[[], Awaitable[None]]
"""Moves one record."""
OTHERS = ("gloo", "nixl")
PULL_LIMIT_S = 60.0
ANSWER_LIMIT_S = 120.0
PEER_ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """One record size.  Speeds in GB/s; ratios of speeds."""

    kv_bytes: int
    rounds: int
    memcpy_gb_s: float
    arena_gb_s: float
    """Same host: export and import."""
    raw_socket_gb_s: float
    """Blocking sendall and recv_into."""
    asyncio_socket_gb_s: float
    """sock_sendall and sock_recv_into."""
    pull_gb_s: float
    gloo_gb_s: float | str
    nixl_gb_s: float | str
    pull_ms: float
    raw_socket_ms: float
    pull_cpu_ms: float
    """Of both sides together; so is the next."""
    raw_socket_cpu_ms: float
    arena_over_memcpy: float
    pull_over_memcpy: float
    pull_over_raw_socket: float
    pull_over_asyncio_socket: float
    gloo_over_raw_socket: float | str
    nixl_over_raw_socket: float | str


def measure(
    sizes_bytes: Sequence[int], rounds: int = 9, peer: str = "", others: Sequence[str] = OTHERS
) -> list[dict[str, Any]]:
    """One row per size, with the fields of Speeds.

    `peer` is the address of `bench pull --serve` on another host; empty starts one here.
    Raises ConfigError where nothing answers there.
    """
    with ExitStack() as stack:
        control = stack.enter_context(_Control(peer or stack.enter_context(_own_peer())))
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tgi-orchestrator-bench-pull-", dir=memory())
        )
        bench = _Bench(control, Path(folder) / "arenas", max(sizes_bytes), others)
        stack.callback(bench.close)
        return asyncio.run(bench.measure(sizes_bytes, rounds))


class _Control:
    """Orders to the other side, each with its answer."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.rpartition(":")
        try:
            self._sock = socket.create_connection((self.host, int(port)), ANSWER_LIMIT_S)
        except (OSError, ValueError) as error:
            raise ConfigError(f"No `bench pull --serve` answers at {address}: {error}.") from None
        self._lines = self._sock.makefile("rwb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._sock.close()

    def order(self, do: str, **details: Any) -> dict[str, Any]:
        """Raises NotHere for what the other side does not have."""
        self._lines.write(json.dumps({"do": do, **details}).encode() + b"\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline())
        if "missing" in answer:
            raise NotHere(answer["missing"])
        return answer


class _Bench:
    """The receiver's side, with everything that stays from size to size."""

    def __init__(self, control: _Control, folder: Path, limit_bytes: int, others: Sequence[str]) -> None:
        self._control = control
        self._ports = control.order("ports")
        self._epoch: int = control.order("start", limit_bytes=limit_bytes)["epoch"]
        self._data = memoryview(bytearray(b"\1") * limit_bytes)
        self._copy = memoryview(bytearray(b"\2") * limit_bytes)
        ring_bytes = RING_RECORDS * (limit_bytes + 2**20)
        self._arena = ArenaBridge(folder, "bench", "l", 0, new_epoch(), FINGERPRINT, ring_bytes, RECORD_TTL_S)
        self._pulled = (folder, "bench", "q", FINGERPRINT, ring_bytes, RECORD_TTL_S, KEY)
        self._others: dict[str, Any] = {}
        self._missing = dict.fromkeys(OTHERS, "left out")
        for name in others:
            try:
                self._others[name] = (
                    self._open_gloo(limit_bytes) if name == "gloo" else self._open_nixl(limit_bytes)
                )
            except NotHere as missing:
                self._missing[name] = str(missing)

    def close(self) -> None:
        self._arena.close()
        for other in self._others.values():
            other.close()

    async def measure(self, sizes_bytes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
        with closing(Puller(*self._pulled)) as puller:
            return [asdict(await self._measure_one(puller, size, rounds)) for size in sizes_bytes]

    async def _measure_one(self, puller: Puller, size: int, rounds: int) -> Speeds:
        """The first round warms up and does not count."""
        times: dict[str, list[float]] = defaultdict(list)
        cpu: dict[str, list[float]] = defaultdict(list)
        kv_bytes = 0
        for _ in range(rounds + 1):
            handle = new_handle()
            kv_bytes = self._control.order("export", handle=handle, size=size)["kv_bytes"]
            for name, way in self._ways(puller, handle, kv_bytes):
                before_s, start = self._cpu_s(), time.perf_counter()
                await way()
                times[name].append(time.perf_counter() - start)
                cpu[name].append(self._cpu_s() - before_s)
        median_s, cpu_s = (
            {name: statistics.median(column[1:]) for name, column in columns.items()}
            for columns in (times, cpu)
        )
        return self._speeds(kv_bytes, rounds, median_s, cpu_s)

    def _cpu_s(self) -> float:
        """Of both processes so far."""
        return time.process_time() + float(self._control.order("cpu")["seconds"])

    def _speeds(
        self, kv_bytes: int, rounds: int, median_s: dict[str, float], cpu_s: dict[str, float]
    ) -> Speeds:
        speed: dict[str, float] = {name: kv_bytes / seconds / 1e9 for name, seconds in median_s.items()}
        raw = speed["raw"]
        found: dict[str, float | str] = {**self._missing, **speed}
        ratios = {name: speed[name] / raw if name in speed else found[name] for name in ("gloo", "nixl")}
        return Speeds(
            kv_bytes=kv_bytes,
            rounds=rounds,
            memcpy_gb_s=speed["memcpy"],
            arena_gb_s=speed["arena"],
            raw_socket_gb_s=raw,
            asyncio_socket_gb_s=speed["asyncio"],
            pull_gb_s=speed["pull"],
            gloo_gb_s=found["gloo"],
            nixl_gb_s=found["nixl"],
            pull_ms=median_s["pull"] * 1e3,
            raw_socket_ms=median_s["raw"] * 1e3,
            pull_cpu_ms=cpu_s["pull"] * 1e3,
            raw_socket_cpu_ms=cpu_s["raw"] * 1e3,
            arena_over_memcpy=speed["arena"] / speed["memcpy"],
            pull_over_memcpy=speed["pull"] / speed["memcpy"],
            pull_over_raw_socket=speed["pull"] / raw,
            pull_over_asyncio_socket=speed["pull"] / speed["asyncio"],
            gloo_over_raw_socket=ratios["gloo"],
            nixl_over_raw_socket=ratios["nixl"],
        )

    # the ways

    def _ways(self, puller: Puller, handle: str, size: int) -> Iterator[tuple[str, Way]]:
        yield "memcpy", partial(self._memcpy, size)
        yield "arena", partial(self._through_arena, handle, size)
        yield "raw", partial(self._raw_socket, size)
        yield "asyncio", partial(self._asyncio_socket, size)
        yield "pull", partial(self._pull, puller, handle)
        for name, other in self._others.items():
            yield name, partial(self._other, other, size)

    async def _memcpy(self, size: int) -> None:
        self._copy[:size] = self._data[:size]

    async def _through_arena(self, handle: str, size: int) -> None:
        tokens = tokens_of(size)
        planes = planes_of(self._data, tokens)
        self._arena.export(handle, range(tokens), FirstToken(1, 0.0), False, planes)
        record = self._arena.own_lookup(handle)
        self._arena.read_into(record, planes_of(self._copy, tokens), tokens)

    async def _raw_socket(self, size: int) -> None:
        """Blocks the loop, which has nothing else to do."""
        with socket.create_connection((self._control.host, self._ports["blocking"])) as sock:
            received = 0
            while received < size:
                received += _some(sock.recv_into(self._copy[received:size]))

    async def _asyncio_socket(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_connection((self._control.host, self._ports["asyncio"])) as sock:
            sock.setblocking(False)
            received = 0
            while received < size:
                received += _some(await loop.sock_recv_into(sock, self._copy[received:size]))

    async def _pull(self, puller: Puller, handle: str) -> None:
        address = f"{self._control.host}:{self._ports['pull']}"
        wanted = PullRequest(PROTOCOL_VERSION, handle, "p", self._epoch, address, PULL_LIMIT_S)
        reply = await puller.pull(replace(wanted, signature=sign(KEY, *wanted.signed())))
        if not reply.found:
            raise ConfigError(f"The pull failed: {reply.reason}.")

    async def _other(self, other: Gloo | Nixl, size: int) -> None:
        other.receive(size)

    def _open_gloo(self, limit_bytes: int) -> Gloo:
        return Gloo(
            self._control.host, self._control.order("gloo", limit_bytes=limit_bytes)["port"], limit_bytes
        )

    def _open_nixl(self, limit_bytes: int) -> Nixl:
        agent = Nixl("client", limit_bytes)
        agent.reach(self._control.order("nixl", limit_bytes=limit_bytes))
        return agent


def _some(received: int) -> int:
    if not received:
        raise ConfigError("The other side closed the connection.")
    return received


@contextmanager
def _own_peer() -> Iterator[str]:
    """A process on this host; its address.  Each side keeps to its half of the cores, as two hosts do."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    command = [sys.executable, "-m", "orchestrator.bench.pull_peer", "127.0.0.1:0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            if half:
                os.sched_setaffinity(child.pid, cores[half:])
                os.sched_setaffinity(0, cores[:half])
            assert child.stdout is not None
            if not (address := child.stdout.readline().strip()):
                raise ConfigError("The other side of the benchmark did not start.")
            yield address
        finally:
            os.sched_setaffinity(0, cores)
            assert child.stdin is not None
            child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                child.wait(PEER_ENDS_S)
            child.kill()
