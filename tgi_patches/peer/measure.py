"""The end that takes: fetches records in every way, in turns, and verifies every byte of them.

What it reports are facts: who mapped which file, which counters moved, how long each way took.  Whether a
way is proved is decided by the one who reads them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.bridge.files import arena_path
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    BridgeMiss,
    PullRequest,
    new_epoch,
    new_handle,
)
from tgi_patches.key import read_key, sign
from tgi_patches.peer.control import Control, Refused
from tgi_patches.peer.group import Group, NotHere
from tgi_patches.peer.look import torch_version
from tgi_patches.peer.records import (
    FINGERPRINT,
    GIVER,
    NEIGHBOUR,
    RECORD_TTL_S,
    TAKER,
    digest_of,
    file_at,
    planes_of,
    record_bytes,
    ring_bytes,
    tokens_of,
)
from tgi_patches.pull.puller import Puller

SMALL_BYTES = 1
"""One token: what is left of its time is latency."""
PULL_LIMIT_S = 30.0
STARTS_S = 30.0
COUNTED_WITHIN_S = 1.0
Facts = dict[str, Any]
Columns = Mapping[str, list[float]]
"""Seconds of every round, by the shard that wrote."""
FAULTS = (ArenaError, BridgeMiss, Refused, OSError, RuntimeError, ValueError, TimeoutError)
"""What a way may fail with: reported, and the next one is tried."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What this end is told."""

    address: str
    """host:port of the other end's control connection."""
    arenas: str
    name: str
    key_file: str
    size_bytes: int
    rounds: int
    ways: list[str]
    """Of arena, pull, gloo and nccl."""


async def measure(wanted: Wanted) -> Facts:
    """Facts by way; `error` or `skipped` in place of figures.  Never raises for what a way may meet."""
    logging.disable(logging.CRITICAL)
    key = read_key(Path(wanted.key_file), "key_file")
    try:
        with Control(wanted.address, key) as control:
            return await _measured(wanted, control, key)
    except FAULTS as error:
        return {"error": f"The other end at {wanted.address} does not answer: {told(error)}."}


async def _measured(wanted: Wanted, control: Control, key: bytes) -> Facts:
    theirs = control.order("hello")
    taker = _Taker(wanted, control, key, theirs)
    ways: dict[str, Callable[[], Any]] = {
        "arena": taker.arena,
        "pull": taker.pull,
        "gloo": lambda: taker.group("gloo"),
        "nccl": lambda: taker.group("nccl"),
    }
    found: Facts = {
        "kv_bytes": record_bytes(wanted.size_bytes),
        "rounds": wanted.rounds,
        "hosts": {"giver": control.host, "taker": control.own_host},
        "torch": {"giver": theirs["torch"], "taker": torch_version()},
    }
    for way in wanted.ways:
        try:
            found[way] = await ways[way]()
        except NotHere as missing:
            found[way] = {"skipped": str(missing)}
        except FAULTS as error:
            found[way] = {"error": told(error)}
    return found


class _Taker:
    def __init__(self, wanted: Wanted, control: Control, key: bytes, theirs: Facts) -> None:
        self._wanted = wanted
        self._control = control
        self._key = key
        self._theirs = theirs
        self._folder = Path(wanted.arenas)
        self._buffer = memoryview(bytearray(b"\1") * record_bytes(wanted.size_bytes))

    # --- the arena ------------------------------------------------------------------------------

    async def arena(self) -> Facts:
        """Records of the other container, and in turn those of a second process in this one."""
        self._check_giver()
        facts: Facts = {"id": [self._theirs["id"], arena_id(self._folder)]}
        facts["file"] = [self._theirs["file"], self._file_here()]
        if any(there != here for there, here in facts.values()):
            return facts  # nothing that could be read here would be theirs
        async with self._neighbour() as neighbour:
            sides = {GIVER: self._control, NEIGHBOUR: neighbour}
            epochs = {GIVER: self._theirs["epoch"], NEIGHBOUR: neighbour.order("hello")["epoch"]}
            with closing(self._reader()) as reader:
                facts |= self._arena_times(reader, sides, epochs)
        return facts

    def _arena_times(self, reader: ArenaBridge, sides: dict[str, Control], epochs: dict[str, int]) -> Facts:
        export_s, read_s, small_s = (defaultdict[str, list[float]](list) for _ in range(3))
        whole = True
        for turn in range(self._wanted.rounds + 1):
            for shard in self._in_turn(turn, sides):
                for size, column in ((SMALL_BYTES, small_s), (self._wanted.size_bytes, read_s)):
                    handle = new_handle()
                    made = sides[shard].order("export", handle=handle, size_bytes=size)
                    column[shard].append(self._read(reader, shard, epochs[shard], handle, size))
                    whole = whole and digest_of(self._buffer[: made["kv_bytes"]]) == made["digest"]
                export_s[shard].append(made["seconds"])
        times = {"export_s": export_s, "read_s": read_s, "small_s": small_s}
        return {"whole": whole, "over_neighbour": _over_neighbour(export_s, read_s)} | {
            name: {shard: _median(column) for shard, column in columns.items()}
            for name, columns in times.items()
        }

    def _in_turn(self, turn: int, sides: dict[str, Control]) -> Iterator[str]:
        """Whoever comes second finds a warmer or a fuller cache: they take turns in that, too."""
        return iter(list(sides)[:: -1 if turn % 2 else 1])

    def _read(self, reader: ArenaBridge, shard: str, epoch: int, handle: str, size: int) -> float:
        """CPU seconds: nothing is waited for here, and others on this machine are no matter of the arena."""
        tokens = tokens_of(size)
        planes = planes_of(self._buffer, tokens)
        start = time.thread_time()
        record = reader.lookup(shard, epoch, handle)
        reader.read_into(record, planes, tokens)
        return time.thread_time() - start

    def _reader(self) -> ArenaBridge:
        return ArenaBridge(
            self._folder, self._wanted.name, TAKER, 0, new_epoch(), FINGERPRINT, 0, RECORD_TTL_S
        )

    def _file_here(self) -> list[int]:
        """The file that this end finds where the other one says that it writes; none is an answer, too."""
        try:
            return file_at(arena_path(self._folder, self._wanted.name, GIVER, 0))
        except OSError:
            return []

    @asynccontextmanager
    async def _neighbour(self) -> AsyncIterator[Control]:
        """A second process of this container, under another name."""
        end = {
            "arenas": self._wanted.arenas,
            "name": self._wanted.name,
            "shard": NEIGHBOUR,
            "key_file": self._wanted.key_file,
            "size_bytes": self._wanted.size_bytes,
            "host": "127.0.0.1",
        }
        flags = ["-I"] if sys.flags.isolated else []
        command = [sys.executable, *flags, "-m", "tgi_patches.peer", "serve", json.dumps(end)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert child.stdout is not None
            async with asyncio.timeout(STARTS_S):
                line = await child.stdout.readline()
            with Control(f"127.0.0.1:{json.loads(line)['port']}", self._key) as control:
                yield control
        finally:
            child.kill()
            await child.wait()

    # --- pulls ----------------------------------------------------------------------------------

    async def pull(self) -> Facts:
        """As a decode shard's sidecar fetches them, by the other container's address."""
        self._check_giver()
        wanted = self._wanted
        ring = ring_bytes(wanted.size_bytes)
        puller = Puller(self._folder, wanted.name, TAKER, FINGERPRINT, ring, RECORD_TTL_S, self._key)
        columns: dict[int, list[float]] = {SMALL_BYTES: [], wanted.size_bytes: []}
        whole, moved_bytes = True, 0
        before, received = self._control.order("pulled")["ok"], received_bytes()
        with closing(puller), closing(self._reader()) as reader:
            for _ in range(wanted.rounds + 1):
                for size, column in columns.items():
                    handle = new_handle()
                    made = self._control.order("export", handle=handle, size_bytes=size)
                    seconds, shard, epoch = await self._pull_one(puller, handle)
                    column.append(seconds)
                    self._read(reader, shard, epoch, handle, size)
                    whole = whole and digest_of(self._buffer[: made["kv_bytes"]]) == made["digest"]
                    moved_bytes += made["kv_bytes"]
        now = received_bytes()
        return {
            "whole": whole,
            "pulls": len(columns) * (wanted.rounds + 1),
            "served": self._served(before + len(columns) * (wanted.rounds + 1)) - before,
            "moved_bytes": moved_bytes,
            "received_bytes": {name: now[name] - received.get(name, 0) for name in now},
            "seconds": _median(columns[wanted.size_bytes]),
            "small_s": _median(columns[SMALL_BYTES]),
        }

    def _served(self, expected: int) -> int:
        """What the other end has counted: it does so a moment after the last byte has left."""
        ends_s = time.monotonic() + COUNTED_WITHIN_S
        while True:
            served = int(self._control.order("pulled")["ok"])
            if served >= expected or time.monotonic() > ends_s:
                return served

    async def _pull_one(self, puller: Puller, handle: str) -> tuple[float, str, int]:
        """Seconds, and where the copy lies."""
        address = f"{self._control.host}:{self._theirs['pull_port']}"
        asked = PullRequest(PROTOCOL_VERSION, handle, GIVER, self._theirs["epoch"], address, PULL_LIMIT_S)
        asked = replace(asked, signature=sign(self._key, *asked.signed()))
        start = time.perf_counter()
        reply = await puller.pull(asked)
        seconds = time.perf_counter() - start
        if not reply.found:
            raise Refused(f"the pull from {address} missed: {reply.reason}")
        return seconds, reply.shard, reply.epoch

    def _check_giver(self) -> None:
        if self._theirs["fault"]:
            raise Refused(self._theirs["fault"])

    # --- groups ---------------------------------------------------------------------------------

    async def group(self, backend: str) -> Facts:
        try:
            port = self._control.order("group", backend=backend, host=self._control.host)["port"]
        except Refused as missing:
            raise NotHere(str(missing)) from None
        meeting = f"{self._control.host}:{port}"
        group = await asyncio.to_thread(Group, backend, 1, meeting, self._control.own_host)
        seconds, whole, moved_bytes = [], True, 0
        received = received_bytes()
        for _ in range(self._wanted.rounds + 1):
            made = self._control.order("fill")
            seconds.append(group.fetch(self._buffer))
            whole = whole and digest_of(self._buffer) == made["digest"]
            moved_bytes += made["kv_bytes"]
        now, via = received_bytes(), group.ways()
        group.stop()
        return {
            "whole": whole,
            "moved_bytes": moved_bytes,
            "received_bytes": {name: now[name] - received.get(name, 0) for name in now},
            "seconds": _median(seconds),
            "via": via,
        }


def told(error: Exception) -> str:
    return " ".join(str(error).partition("\n")[0].split()) or type(error).__name__


def received_bytes(path: Path = Path("/proc/net/dev")) -> dict[str, int]:
    """By interface, since it is up."""
    lines = [line.partition(":") for line in path.read_text().splitlines() if ":" in line]
    return {name.strip(): int(rest.split()[0]) for name, _, rest in lines}


def _over_neighbour(export_s: Columns, read_s: Columns) -> dict[str, float]:
    """Speeds against those of the second process, round by round: what disturbs both disturbs no ratio."""
    whole_s = {
        shard: [export + read for export, read in zip(export_s[shard], read_s[shard], strict=True)]
        for shard in (GIVER, NEIGHBOUR)
    }
    return {
        name: _median([near / far for near, far in zip(times[NEIGHBOUR], times[GIVER], strict=True)])
        for name, times in (("whole", whole_s), ("read", read_s))
    }


def _median(column: list[float]) -> float:
    """The first round warmed up and does not count."""
    return statistics.median(column[1:])
