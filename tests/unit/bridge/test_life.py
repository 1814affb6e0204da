"""Random lives of a ring against a model, and a writer that stops at any line of its code."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tgi_patches.bridge import Bridge, FirstToken, Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=2, kv_heads=3, head_dim=64)
RING_BYTES = 65536
PINNED_BYTES = 8192
TTL_NS = 1000
SLOTS = 8
GUARD = 0x5A


P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


@dataclass(frozen=True)
class Made:
    """What the model knows of one export."""

    handle: str
    epoch: int
    sequence: int
    made_ns: int
    ids: tuple[int, ...]
    first: FirstToken
    planes: tuple[bytes, ...]
    record: Record
    pinned: bool

    @property
    def footprint(self) -> int:
        """An upper bound of its bytes in the ring."""
        data = sum(len(plane) for plane in self.planes)
        return data + 4 * len(self.ids) + 12 * len(self.planes) + 3 * 64

    @property
    def pinned_bytes(self) -> int:
        """Ids and rows of 4 bytes, a checksum of 8 per plane, then the data, each in whole lines of 64."""
        front = -(-4 * (len(self.ids) + len(self.planes)) // 8) * 8 + 8 * len(self.planes)
        return -(-front // 64) * 64 + -(-sum(map(len, self.planes)) // 64) * 64


def fragments(data: bytearray, noise: random.Random, row: int) -> list[memoryview]:
    """The plane as runs of whole tokens of random length."""
    tokens = len(data) // row
    edges = sorted({0, tokens, *(noise.randint(0, tokens) for _ in range(noise.randint(0, 4)))})
    return [memoryview(data)[a * row : b * row] for a, b in pairwise(edges)]


def or_reason(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | MissReason:
    """What `call` returns, or the reason of its miss."""
    try:
        return call(*args, **kwargs)
    except BridgeMiss as miss:
        return miss.reason


class BridgeLife(RuleBasedStateMachine):
    """One owner and one reader; subclasses say where the bytes live."""

    made = Bundle("made")

    def open_owner(self, epoch: int) -> Bridge:
        raise AssertionError

    def open_reader(self) -> Bridge:
        raise AssertionError

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.epoch = 1
        self.history: list[Made] = []
        self.pinned: dict[str, Made] = {}
        self.owner = self.open_owner(self.epoch)
        self.reader = self.open_reader()

    @rule(
        target=made,
        name=st.integers(0, 30),
        tokens=st.integers(1, 40),
        rows=st.lists(st.integers(1, 120), min_size=1, max_size=3),
        seed=st.integers(0, 2**32),
        pinned=st.booleans(),
    )
    def export(self, name: int, tokens: int, rows: list[int], seed: int, pinned: bool) -> Made:
        """What does not fit into the pinned region goes to the ring."""
        noise = random.Random(seed)
        planes = tuple(noise.randbytes(tokens * row) for row in rows)
        ids = tuple(noise.randrange(2**32) for _ in range(tokens))
        top = tuple((noise.randrange(2**32), noise.random()) for _ in range(noise.randint(0, 5)))
        first = FirstToken(noise.randrange(2**32), -noise.random(), top)
        views = [fragments(bytearray(p), noise, row) for p, row in zip(planes, rows, strict=True)]
        handle = f"{name:032x}"
        record = or_reason(self.owner.export, handle, ids, first, bool(seed % 2), views, pinned=pinned)
        if isinstance(record, MissReason):
            assert pinned
            assert record in (MissReason.PINNED_FULL, MissReason.LAYOUT)
            self.forget_expired()
            assert record == MissReason.LAYOUT or not any(map(self.expired, self.pinned.values()))
            return self.export(name, tokens, rows, seed, pinned=False)
        now_ns = self.clock.now_ns
        made = Made(handle, self.epoch, record.sequence, now_ns, ids, first, planes, record, pinned)
        self.history.append(made)
        self.pinned.pop(handle, None)
        if pinned:
            self.pinned[handle] = made
            self.forget_expired()
        return made

    def expired(self, made: Made) -> bool:
        return self.clock.now_ns >= made.made_ns + TTL_NS

    def forget_expired(self) -> None:
        """After an attempt to pin: either all expired records still have their places, or none has."""
        held = sum(made.pinned_bytes for made in self.pinned.values())
        if self.owner.pinned_free_bytes + held != PINNED_BYTES:
            self.pinned = {name: made for name, made in self.pinned.items() if not self.expired(made)}

    @rule(wanted=made)
    def release(self, wanted: Made) -> None:
        assert self.owner.release(wanted.handle) == (self.pinned.pop(wanted.handle, None) is not None)

    @rule(wanted=made, share=st.floats(0, 1), seed=st.integers(0, 2**32))
    def read(self, wanted: Made, share: float, seed: int) -> None:
        """What is accepted is right, whatever else happened; what must be there is accepted."""
        record = or_reason(self.reader.lookup, "p", wanted.epoch, wanted.handle)
        if isinstance(record, MissReason):
            assert record in self.acceptable(wanted)
            return
        newest = [made for made in self.history if made.handle == wanted.handle][-1]
        assert (record.epoch, record.sequence) == (newest.epoch, newest.sequence)
        assert not self.expired(newest)
        assert newest.pinned == (self.pinned.get(newest.handle) is newest)
        assert record == newest.record
        assert (record.token_ids, record.first) == (newest.ids, newest.first)
        self.check_bytes(record, newest, share, random.Random(seed))

    @rule(wanted=made)
    def read_what_was_looked_up_long_ago(self, wanted: Made) -> None:
        """A record in hand does not expire, but it is refused once it is gone."""
        miss = or_reason(self.check_bytes, wanted.record, wanted, 1.0, random.Random(1))
        if wanted.epoch != self.epoch:
            assert miss == MissReason.EPOCH
        elif self.certainly_live(wanted):
            assert miss is None
        else:
            assert miss in (None, MissReason.OVERWRITTEN)

    @rule(step_ns=st.sampled_from([1, 100, TTL_NS - 1, TTL_NS]))
    def let_time_pass(self, step_ns: int) -> None:
        self.clock.now_ns += step_ns

    @rule()
    def restart_the_owner(self) -> None:
        self.owner.close()
        self.epoch += 1
        self.pinned.clear()
        self.owner = self.open_owner(self.epoch)

    @rule(wanted=made, seed=st.integers(0, 2**32))
    def export_the_same_handle_again(self, wanted: Made, seed: int) -> None:
        self.export(int(wanted.handle, 16), 3, [10, 20], seed, pinned=seed % 3 == 0)

    @invariant()
    def live_records_never_overlap(self) -> None:
        """By their places: those of the ring in the ring, the pinned ones in their region."""
        for pinned, room in ((False, RING_BYTES), (True, PINNED_BYTES)):
            spans = sorted(self.spans(pinned=pinned))
            for (_, end), (start, _) in pairwise(spans):
                assert end <= start
            assert all(end <= room for _, end in spans)
            assert pinned or len(spans) <= SLOTS

    @invariant()
    def no_pinned_byte_is_lost(self) -> None:
        held = sum(made.pinned_bytes for made in self.pinned.values())
        assert self.owner.pinned_free_bytes + held == PINNED_BYTES
        assert len(self.spans(pinned=True)) == sum(not self.expired(made) for made in self.pinned.values())

    def spans(self, *, pinned: bool) -> list[tuple[int, int]]:
        """(start, end) of the description and data of every live record."""
        found = []
        for made in self.history:
            record = or_reason(self.owner.own_lookup, made.handle)
            if isinstance(record, MissReason):
                continue
            if (record.epoch, record.sequence, made.pinned) == (made.epoch, made.sequence, pinned):
                start = record.place.position % (PINNED_BYTES if pinned else RING_BYTES)
                found.append((start, start + 4 * len(record.token_ids) + record.kv_bytes))
        return found

    def certainly_live(self, made: Made) -> bool:
        """Its place is pinned, or it is of the newest within half the ring and not superseded."""
        if made.epoch != self.epoch:
            return False
        if made.pinned:
            return self.pinned.get(made.handle) is made
        later = [other for other in self.history if other.epoch == self.epoch][made.sequence :]
        in_ring = [other for other in later if not other.pinned]
        room = sum(other.footprint for other in in_ring) + made.footprint
        superseded = any(other.handle == made.handle for other in later)
        return not superseded and room <= RING_BYTES // 2 and len(in_ring) < SLOTS

    def acceptable(self, wanted: Made) -> set[MissReason]:
        """Reasons that a lookup of this handle under its epoch may give now."""
        if wanted.epoch != self.epoch:
            return {MissReason.EPOCH}
        newest = [made for made in self.history if made.handle == wanted.handle][-1]
        if self.expired(newest):
            return {MissReason.MISSING, MissReason.OVERWRITTEN}
        assert not self.certainly_live(newest)
        return {MissReason.OVERWRITTEN, MissReason.MISSING}

    def check_bytes(self, record: Record, made: Made, share: float, noise: random.Random) -> None:
        tokens = round(share * len(made.ids))
        targets = [bytearray([GUARD]) * (len(plane) + 1) for plane in made.planes]
        views = []
        for target, plane in zip(targets, made.planes, strict=True):
            row = len(plane) // len(made.ids)
            runs = fragments(bytearray(tokens * row), noise, row) if tokens else []
            edges = [0]
            for run in runs:
                edges.append(edges[-1] + len(run))
            views.append([memoryview(target)[a:b] for a, b in pairwise(edges)])
        self.reader.read_into(record, views, tokens)
        for target, plane in zip(targets, made.planes, strict=True):
            size = len(plane) // len(made.ids) * tokens
            assert target[:size] == plane[:size]
            assert set(target[size:]) == {GUARD}

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            self.owner.close()
            self.reader.close()


class ArenaLife(BridgeLife):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def open(self, shard: str, epoch: int, ring_bytes: int) -> ArenaBridge:
        root = Path(self.folder.name) / "arenas"
        return ArenaBridge(
            root,
            "d",
            shard,
            0,
            epoch,
            FINGERPRINT,
            ring_bytes,
            TTL_NS / 1e9,
            pinned_bytes=PINNED_BYTES,
            index_slots=SLOTS,
            clock=self.clock,
        )

    def open_owner(self, epoch: int) -> Bridge:
        return self.open("p", epoch, RING_BYTES)

    def open_reader(self) -> Bridge:
        reader = self.open("r", 1, 0)
        with pytest.raises(BridgeMiss):  # maps the owner's arena
            reader.lookup("p", 1, "0" * 32)
        return reader

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


class MemoryLife(BridgeLife):
    def __init__(self) -> None:
        super().__init__()
        self.host = MemoryHost()

    def open_owner(self, epoch: int) -> Bridge:
        return MemoryBridge(
            self.host,
            "p",
            epoch,
            FINGERPRINT,
            RING_BYTES,
            TTL_NS / 1e9,
            pinned_bytes=PINNED_BYTES,
            index_slots=SLOTS,
            clock=self.clock,
        )

    def open_reader(self) -> Bridge:
        return MemoryBridge(self.host, "r", 1, FINGERPRINT, 0, TTL_NS / 1e9, clock=self.clock)


LIFE = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestArenaLife: Any = ArenaLife.TestCase
TestArenaLife.settings = LIFE
TestMemoryLife: Any = MemoryLife.TestCase
TestMemoryLife.settings = LIFE
