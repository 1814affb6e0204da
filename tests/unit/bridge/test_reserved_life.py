"""Random lives of reservations: as long as one is valid its bytes are its own, and readers see no others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from xxhash import xxh3_64_intdigest

from tests.unit.bridge.conftest import FIRST, Bed, handle, runs_of
from tgi_patches.bridge import Bridge, Reservation
from tgi_patches.contract import BridgeMiss, MissReason

STEPS = 150
TOKENS = 4


@dataclass
class Open:
    number: int
    planes: list[bytes]
    reservation: Reservation
    checked: bool

    def is_untouched(self) -> bool:
        return bytes(self.reservation.data) == b"".join(self.planes)


@dataclass
class Life:
    """One owner, one reader, and what was published last under each handle."""

    owner: Bridge
    reader: Bridge
    noise: random.Random
    opened: list[Open] = field(default_factory=list)
    published: dict[int, list[bytes]] = field(default_factory=dict)
    refused: int = 0
    hits: int = 0

    def some_planes(self) -> list[bytes]:
        row = self.noise.choice([4, 100, 900])
        return [self.noise.randbytes(TOKENS * row) for _ in range(self.noise.randint(1, 3))]

    def reserve(self) -> None:
        planes, number, checked = self.some_planes(), self.noise.randint(0, 9), self.noise.random() < 0.7
        sizes = [len(plane) for plane in planes]
        reservation = self.owner.reserve(handle(number), range(TOKENS), FIRST, False, sizes, checked=checked)
        reservation.data[:] = b"".join(planes)
        self.opened.append(Open(number, planes, reservation, checked))

    def take(self) -> Open | None:
        return self.opened.pop(self.noise.randrange(len(self.opened))) if self.opened else None

    def publish(self) -> None:
        if (taken := self.take()) is None:
            return
        sums = [xxh3_64_intdigest(plane) for plane in taken.planes] if taken.checked else []
        if taken.reservation.valid:
            taken.reservation.publish(sums)
            self.published[taken.number] = taken.planes
            assert self.read(taken.number) == taken.planes
            return
        with pytest.raises(BridgeMiss) as caught:
            taken.reservation.publish(sums)
        assert caught.value.reason == MissReason.OVERWRITTEN
        self.refused += 1

    def abandon(self) -> None:
        if (taken := self.take()) is not None:
            taken.reservation.abandon()

    def export(self) -> None:
        planes, number = self.some_planes(), self.noise.randint(0, 9)
        self.owner.export(handle(number), range(TOKENS), FIRST, False, runs_of(planes))
        self.published[number] = planes
        assert self.read(number) == planes

    def look(self) -> None:
        """Everything that can be read is what was published last."""
        for number in range(10):
            found = self.read(number)
            assert found is None or found == self.published[number]
            self.hits += found is not None

    def read(self, number: int) -> list[bytes] | None:
        try:
            record = self.reader.lookup("p", 1, handle(number))
            targets = [bytearray(row * TOKENS) for row in record.rows]
            self.reader.read_into(record, [[memoryview(target)] for target in targets], TOKENS)
        except BridgeMiss as miss:
            if miss.reason not in (MissReason.MISSING, MissReason.OVERWRITTEN):
                raise
            return None
        return [bytes(target) for target in targets]


@pytest.mark.parametrize("index_slots", [4, 64])
@pytest.mark.parametrize("seed", range(6))
def test_no_reservation_ever_meets_another_record(bed: Bed, seed: int, index_slots: int) -> None:
    """In 64 KiB, which 150 steps fill several times."""
    life = Life(bed.open("p", index_slots=index_slots), bed.open("d"), random.Random(seed))
    steps = [life.reserve, life.reserve, life.publish, life.abandon, life.export, life.look]
    for _ in range(STEPS):
        life.noise.choice(steps)()
        assert all(one.is_untouched() for one in life.opened if one.reservation.valid)
    assert life.hits
    if index_slots == 4:
        assert life.refused
