"""One end of a link as a process: what a server's event loop does, told what to do through its FIFO.

Beyond the lines of `rendezvous`: `give PEER NUMBER TOKENS`; `other` and `longer`, which give what was not
offered; and `show NUMBER TOKENS`, which says `shown NUMBER HASH`, the hash of what is in the inventory, or
why nothing is.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import torch
from torch import Tensor

from tgi_patches.contract import BridgeMiss
from tgi_patches.device.pending import LoopPoller
from tgi_patches.transport.exchange import Inventory, Offer, checksum_of, hash_of, packed
from tgi_patches.transport.gloo import GlooMeeting
from tgi_patches.transport.lines import LineReader, LineWriter
from tgi_patches.transport.rendezvous import Links, Local
from tgi_patches.transport.state import LinkLimits

EPOCH = 77
BUDGET_BYTES = 1 << 28


def handle(number: int) -> str:
    return f"{number:032x}"


def content(number: int, size_bytes: int) -> bytes:
    """The planes of record `number`."""
    return random.Random(number).randbytes(size_bytes)


class End:
    def __init__(self, folder: Path, name: str, rows: tuple[int, ...], limits: LinkLimits) -> None:
        loop = asyncio.get_running_loop()
        self.rows = rows
        self.answers = LineWriter(folder / f"{name}.answers")
        self.inventory = Inventory(BUDGET_BYTES, ttl_s=60.0)
        local = Local(self.inventory, rows, self.empty, loop.time, limits)
        self.links = Links(local, GlooMeeting(folder, timeout_s=3.0), self.answers.write, outcome=self.told)
        self.poller = LoopPoller(loop, self.links)
        self.reader = LineReader(folder / f"{name}.commands", self.heard)
        self.sequence = 0
        self.reader.open()
        self.answers.write("up . .")

    @staticmethod
    def empty(size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def told(self, offer: Offer, result: str) -> None:
        self.answers.write(f"given {int(offer.handle, 16)} {result}")

    def heard(self, line: str) -> None:
        word, *rest = line.split(" ")
        if word in ("give", "other", "longer"):
            self.give(word, rest[0], int(rest[1]), int(rest[2]))
        elif word == "show":
            self.show(int(rest[0]), int(rest[1]))
        else:
            self.links.heard(line)
        self.poller.kick()

    def give(self, how: str, peer: str, number: int, tokens: int) -> None:
        self.sequence += 1
        planes = torch.frombuffer(bytearray(content(number, tokens * sum(self.rows))), dtype=torch.uint8)
        offer = Offer(
            handle=handle(number),
            epoch=EPOCH,
            sequence=self.sequence,
            rank=0,
            ranks=1,
            tokens=tokens,
            rows=self.rows,
            tokens_hash=hash_of(range(tokens)),
            first_id=9,
            first_logprob=-0.25,
            checksum=checksum_of(planes),
        )
        payload = packed(planes, offer)
        if how == "other":
            payload[-1] ^= 1  # of the trailer
        try:
            self.links.give(peer, offer, payload)
            if how == "longer":
                giver = self.links._giving[peer].giver  # what `give` itself refuses to do
                assert giver is not None
                longer = offer, torch.cat([payload, payload])
                if giver.current is not None:
                    giver.current = longer
                else:
                    giver.waiting[-1] = longer
        except BridgeMiss as miss:
            self.told(offer, str(miss.reason))

    def show(self, number: int, tokens: int) -> None:
        try:
            arrived = self.inventory.lookup(
                handle(number), EPOCH, range(tokens), asyncio.get_running_loop().time()
            )
        except BridgeMiss as miss:
            self.answers.write(f"shown {number} {miss.reason}")
            return
        found = hashlib.blake2b(arrived.planes.numpy().tobytes(), digest_size=16).hexdigest()
        self.answers.write(f"shown {number} {found}")


async def serve(folder: Path, name: str, rows: tuple[int, ...], limits: LinkLimits) -> None:
    end = End(folder, name, rows, limits)
    try:
        await asyncio.Event().wait()
    finally:
        end.reader.close()


def main(folder: str, name: str, rows: tuple[int, ...], limits: LinkLimits) -> None:
    """In a process of its own, until it is killed."""
    torch.set_num_threads(1)
    asyncio.run(serve(Path(folder), name, rows, limits))
