"""A writer and a reader in two processes, killed at random: no wrong byte is ever accepted.

As a test a few seconds; `python tests/integration/test_arena_stress.py --seconds 60` for longer.
Records follow from their handle, so the reader knows every byte without asking the writer.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tgi_patches.bridge import FirstToken, Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.layout import Word
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason, new_epoch

FINGERPRINT = Fingerprint("stress", "r1", "tok", "float32", "float32", layers=2, kv_heads=3, head_dim=64)
RING_BYTES = 2**20
PINNED_BYTES = 2**18
SLOTS = 32
REPORT_EVERY = 100
HITS = 100
PATIENCE_S = 60.0
WRONG = 3
"""Exit code of a reader that accepted a wrong byte."""


@dataclass(frozen=True)
class Truth:
    """What the record of a handle must hold."""

    ids: tuple[int, ...]
    first: FirstToken
    ended: bool
    planes: tuple[bytes, ...]


def handle_of(epoch: int, number: int) -> str:
    return hashlib.blake2b(f"{epoch}.{number}".encode(), digest_size=16).hexdigest()


def truth_of(handle: str) -> Truth:
    noise = random.Random(handle)
    tokens = noise.randint(1, 64)
    row, planes = noise.choice([(96, 2), (1024, 2), (256, 8), (509, 3), (1000, 4)])
    return Truth(
        ids=tuple(noise.randrange(2**32) for _ in range(tokens)),
        first=FirstToken(
            noise.randrange(2**32), -noise.random(), ((noise.randrange(2**32), -noise.random()),)
        ),
        ended=noise.random() < 0.1,
        planes=tuple(noise.randbytes(tokens * row) for _ in range(planes)),
    )


def cut(data: bytearray | bytes, tokens: int, noise: random.Random) -> list[memoryview]:
    row = len(data) // tokens
    middle = noise.randint(0, tokens) * row
    return [run for run in (memoryview(data)[:middle], memoryview(data)[middle:]) if len(run)]


def open_bridge(root: Path, shard: str, epoch: int, ring_bytes: int) -> ArenaBridge:
    return ArenaBridge(
        root,
        "stress",
        shard,
        0,
        epoch,
        FINGERPRINT,
        ring_bytes,
        0.5,
        pinned_bytes=PINNED_BYTES,
        index_slots=SLOTS,
    )


def write_for_ever(root: Path) -> None:
    epoch = new_epoch()
    bridge = open_bridge(root, "p", epoch, RING_BYTES)
    noise = random.Random(epoch)
    pinned: collections.deque[str] = collections.deque()
    for number in range(2**62):
        handle = handle_of(epoch, number)
        truth = truth_of(handle)
        views = [cut(plane, len(truth.ids), noise) for plane in truth.planes]
        if noise.random() < 0.6:
            bridge.export(handle, truth.ids, truth.first, truth.ended, views)
            continue
        while not pin(bridge, handle, truth, views):
            bridge.release(pinned.popleft())
        pinned.append(handle)


def pin(bridge: ArenaBridge, handle: str, truth: Truth, views: list[list[memoryview]]) -> bool:
    """False while the pinned region has no room for it."""
    try:
        bridge.export(handle, truth.ids, truth.first, truth.ended, views, pinned=True)
    except BridgeMiss as miss:
        if miss.reason != MissReason.PINNED_FULL:
            raise
        return False
    return True


def read_for_ever(root: Path) -> None:
    """Counts go to stdout as JSON lines; the first wrong byte ends the process with WRONG."""
    bridge = open_bridge(root, "d", 1, 0)
    noise = random.Random(os.getpid())
    counts: collections.Counter[str] = collections.Counter()
    path = root / "stress" / "p.0.arena"
    for turn in range(1, 2**62):
        epoch, exports = header_of(path)
        handle = handle_of(epoch, exports - noise.randint(0, 12))
        counts[read_one(bridge, epoch, handle, noise)] += 1
        if turn % REPORT_EVERY == 0:
            sys.stdout.write(json.dumps(counts) + "\n")
            sys.stdout.flush()
            counts.clear()


def header_of(path: Path) -> tuple[int, int]:
    """Epoch and number of exports of the writer; zeros while there is none."""
    try:
        with path.open("rb") as file:
            words = memoryview(file.read(4096).ljust(4096, b"\0")).cast("Q")
    except FileNotFoundError:
        return 0, 0
    return words[Word.EPOCH], words[Word.EXPORTS]


def read_one(bridge: ArenaBridge, epoch: int, handle: str, noise: random.Random) -> str:
    """`hit` or `pinned_hit`, or where and why it was a miss; a hit is compared byte by byte."""
    try:
        record = bridge.lookup("p", epoch, handle)
    except BridgeMiss as miss:
        return f"lookup_{miss.reason}"
    place = "pinned_" if record.place.pinned else ""
    truth = truth_of(handle)
    tokens = noise.choice([len(truth.ids), max(1, len(truth.ids) - 1)])
    sizes = [len(plane) // len(truth.ids) * tokens for plane in truth.planes]
    targets = [bytearray(size) for size in sizes]
    try:
        bridge.read_into(record, [cut(target, tokens, noise) for target in targets], tokens)
    except BridgeMiss as miss:
        return f"{place}read_{miss.reason}"
    if not matches(record, truth) or any(
        t != p[: len(t)] for t, p in zip(targets, truth.planes, strict=True)
    ):
        sys.stdout.write(json.dumps({"wrong": 1}) + "\n")
        sys.stdout.flush()
        sys.exit(WRONG)
    return f"{place}hit"


def matches(record: Record, truth: Truth) -> bool:
    return (record.token_ids, record.first, record.ended) == (truth.ids, truth.first, truth.ended)


@dataclass
class Stress:
    """The parent: keeps one writer and one reader alive and kills them at random."""

    root: Path
    noise: random.Random
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    epochs: set[int] = field(default_factory=set)
    kills: collections.Counter[str] = field(default_factory=collections.Counter)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        last = end + PATIENCE_S
        with (self.root / "reader.log").open("a+") as log:
            children = {kind: self.start(kind, log.fileno()) for kind in ("writer", "reader")}
            try:
                while time.monotonic() < end or (time.monotonic() < last and not self.enough(log)):
                    time.sleep(self.noise.uniform(0.1, 0.6))
                    self.epochs.add(header_of(self.root / "arenas" / "stress" / "p.0.arena")[0])
                    kind = self.noise.choice(["writer", "reader"])
                    self.finish(kind, children[kind])
                    children[kind] = self.start(kind, log.fileno())
            finally:
                for kind, child in children.items():
                    self.finish(kind, child)
            self.counts = counted(log)

    def enough(self, log: TextIO) -> bool:
        """Both sides have worked: a slow machine gets more time for it."""
        counts = counted(log)
        hits = min(counts["hit"], counts["pinned_hit"])
        return hits >= HITS and overtaken(counts) >= 1 and len(self.epochs) >= 2

    def start(self, kind: str, stdout: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, kind, str(self.root / "arenas")]
        return subprocess.Popen(
            command, stdout=stdout, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )

    def finish(self, kind: str, child: subprocess.Popen[bytes]) -> None:
        """Kill it; a child that ended by itself is counted by its exit code."""
        ended = child.poll()
        child.kill()
        child.wait(10.0)
        self.kills[kind if ended is None else f"{kind}_exit_{ended}"] += 1


def counted(log: TextIO) -> collections.Counter[str]:
    """All reports of all readers so far, added up."""
    log.seek(0)
    counts: collections.Counter[str] = collections.Counter()
    for line in log:
        try:
            counts.update(json.loads(line))
        except json.JSONDecodeError:  # a reader was killed while it wrote
            counts["torn_reports"] += 1
    return counts


def overtaken(counts: collections.Counter[str]) -> int:
    return counts["read_overwritten"] + counts["lookup_overwritten"]


def stress(seconds: float, seed: int) -> Stress:
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        run = Stress(Path(folder), random.Random(seed))
        run.run(seconds)
        return run


def test_no_wrong_byte_is_accepted_while_both_sides_are_killed() -> None:
    found = stress(float(os.environ.get("ARENA_STRESS_S", "5")), seed=1)
    assert found.counts["wrong"] == 0
    assert found.kills.keys() == {"writer", "reader"}, "a child ended by itself"
    assert min(found.counts["hit"], found.counts["pinned_hit"]) >= HITS
    assert overtaken(found.counts) >= 1, "never overtaken"
    assert len(found.epochs) >= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", choices=["writer", "reader"])
    parser.add_argument("root", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.kind:
        {"writer": write_for_ever, "reader": read_for_ever}[options.kind](options.root)
        return
    found = stress(options.seconds, options.seed)
    report = {"counts": found.counts, "kills": found.kills, "epochs": len(found.epochs)}
    sys.stdout.write(json.dumps(report, sort_keys=True) + "\n")
    sys.exit(1 if found.counts["wrong"] else 0)


if __name__ == "__main__":
    main()
