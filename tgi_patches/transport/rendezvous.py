"""The links of one server process, and how its sidecar brings them about: lines in, lines out.

    sidecar -> server             server -> sidecar
    invite PEER                   invited PEER WHERE      it waits there as the giver
    join PEER WHERE               offer PEER JSON         a record for that peer
    offer PEER JSON               answer PEER HANDLE [REASON]
    answer PEER HANDLE [REASON]   moved PEER HANDLE       it can be imported there
    leave PEER                    lost PEER REASON

Two sidecars pass the lines on: `invited` of one server is `join` for the other, `offer` and `answer` keep
their names.  After `lost` they begin again with `invite`.  WHERE is an NCCL id, or a file of gloo's; either
is made anew for every connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tgi_patches.bridge import ArenaError
from tgi_patches.contract import BridgeMiss, ContractError, MissReason, checked_part
from tgi_patches.transport.exchange import Giver, Inventory, Offer, Taker, words_of
from tgi_patches.transport.link import Communicator, Link, LinkError
from tgi_patches.transport.state import LinkLimits, Phase


class Meeting(Protocol):
    """Makes communicators of one kind."""

    def invite(self) -> str:
        """A new place to meet, in one word.  Raises LinkError."""

    def communicator(self, where: str, rank: int) -> Communicator:
        """One end of it: 0 gives, 1 takes.  Raises LinkError where `where` is no such place."""


@dataclass(slots=True)
class _End:
    """This server's end of one link; either half is there."""

    link: Link
    giver: Giver | None = None
    taker: Taker | None = None

    def moved(self) -> None:
        if self.giver is not None:
            self.giver.moved()
        if self.taker is not None:
            self.taker.moved()

    def lost(self) -> None:
        if self.giver is not None:
            self.giver.lost()
        if self.taker is not None:
            self.taker.lost()


@dataclass(frozen=True, slots=True)
class Local:
    """What the links of this server share."""

    inventory: Inventory
    rows: tuple[int, ...]
    empty: Callable[[int], Tensor]
    clock: Callable[[], float]
    limits: LinkLimits


class Links:
    """Told lines by `heard`, polled by steps and by the loop; speaks through `write`."""

    def __init__(
        self,
        local: Local,
        meeting: Meeting,
        write: Callable[[str], object],
        *,
        outcome: Callable[[Offer, str], object],
    ) -> None:
        self._local = local
        self._meeting = meeting
        self._write = write
        self._outcome = outcome
        self._giving: dict[str, _End] = {}
        self._taking: dict[str, _End] = {}

    def __len__(self) -> int:
        """Links of which something is awaited."""
        return sum(end.link.busy or _waits(end) for end in self._all())

    def phase(self, peer: str, *, giving: bool) -> Phase:
        end = (self._giving if giving else self._taking).get(peer)
        return Phase.IDLE if end is None else end.link.phase

    def counts(self) -> dict[str, int]:
        """Of records that came, by result."""
        total: dict[str, int] = {}
        for end in self._taking.values():
            for result, count in end.taker.counts.items() if end.taker else ():
                total[str(result)] = total.get(str(result), 0) + count
        return total

    def give(self, peer: str, offer: Offer, payload: Tensor) -> None:
        """Raises BridgeMiss LINK where no link to `peer` is up."""
        end = self._giving.get(peer)
        if end is None or end.giver is None or end.link.phase in (Phase.IDLE, Phase.ABORTED):
            raise BridgeMiss(MissReason.LINK, f"no link to {peer}")
        end.giver.give(offer, payload)
        end.giver.poll(self._local.clock())

    def poll(self, now_s: float) -> None:
        for end in self._all():
            end.link.poll(now_s)
            if end.giver is not None:
                end.giver.poll(now_s)
            if end.taker is not None:
                end.taker.poll(now_s)

    def heard(self, line: str) -> None:
        """A line of the sidecar; what is none of ours is ignored."""
        word, _, rest = line.partition(" ")
        peer, _, text = rest.partition(" ")
        try:
            checked_part(peer, "peer")
        except ContractError:
            return
        now_s = self._local.clock()
        if word == "invite":
            self._invite(peer, now_s)
        elif word == "join":
            self._join(peer, text, now_s)
        elif word == "offer" and (end := self._taking.get(peer)) is not None and end.taker is not None:
            end.taker.offered(text, now_s)
        elif word == "answer" and (end := self._giving.get(peer)) is not None and end.giver is not None:
            end.giver.answered(*words_of(text), now_s)
        elif word == "leave":
            self._leave(peer, now_s)

    def close(self) -> None:
        """Abort all of them: before a Warmup, and at the end."""
        for end in self._all():
            end.link.fail("closed", self._local.clock())

    def _invite(self, peer: str, now_s: float) -> None:
        end = self._giving_end(peer)
        if not self._free(end, peer, now_s):
            return
        try:
            where = self._meeting.invite()
        except LinkError as error:
            self._say(peer, "lost", str(error))
            return
        if self._connect(end, peer, where, 0, now_s):
            self._say(peer, "invited", where)

    def _join(self, peer: str, where: str, now_s: float) -> None:
        end = self._taking_end(peer)
        if self._free(end, peer, now_s):
            self._connect(end, peer, where, 1, now_s)

    def _free(self, end: _End, peer: str, now_s: float) -> bool:
        """A link of the peer's earlier life gives way, and says `lost`; so does one that rests."""
        if end.link.phase is Phase.ABORTED:
            self._say(peer, "lost", f"it rests: {end.link.state.reason}")
        end.link.fail("the peer comes anew", now_s)
        return end.link.phase is Phase.IDLE

    def _connect(self, end: _End, peer: str, where: str, rank: int, now_s: float) -> bool:
        try:
            communicator = self._meeting.communicator(where, rank)
        except LinkError as error:
            self._say(peer, "lost", str(error))
            return False
        end.link.connect(communicator, now_s)
        return end.link.phase is Phase.CONNECTING

    def _leave(self, peer: str, now_s: float) -> None:
        for end in (self._giving.get(peer), self._taking.get(peer)):
            if end is not None:
                end.link.fail("the peer left", now_s)

    def _giving_end(self, peer: str) -> _End:
        end = self._giving.get(peer)
        if end is None:
            end = self._giving[peer] = self._new_end(peer)
            end.giver = Giver(end.link, lambda word, text: self._say(peer, word, text), self._outcome)
        return end

    def _taking_end(self, peer: str) -> _End:
        end = self._taking.get(peer)
        if end is None:
            end = self._taking[peer] = self._new_end(peer)
            local = self._local
            end.taker = Taker(
                end.link,
                lambda word, text: self._say(peer, word, text),
                local.inventory,
                local.rows,
                local.empty,
                local.clock,
            )
        return end

    def _new_end(self, peer: str) -> _End:
        def moved() -> None:
            end.moved()

        def lost(reason: str) -> None:
            end.lost()
            self._say(peer, "lost", reason)

        end = _End(Link(self._local.limits, moved=moved, lost=lost))
        return end

    def _say(self, peer: str, word: str, text: str) -> None:
        self._write(f"{word} {peer} {' '.join(text.split())}")

    def _all(self) -> list[_End]:
        return [*self._giving.values(), *self._taking.values()]


def _waits(end: _End) -> bool:
    return end.giver is not None and bool(end.giver.waiting) and end.link.phase is Phase.READY


def commands_path(directory: Path, deployment: str, shard: str, rank: int) -> Path:
    """The FIFO of what a sidecar tells its server, beside the arena of the same shard and rank."""
    return _beside(directory, deployment, shard, rank, "commands")


def answers_path(directory: Path, deployment: str, shard: str, rank: int) -> Path:
    """The FIFO the other way."""
    return _beside(directory, deployment, shard, rank, "answers")


def _beside(directory: Path, deployment: str, shard: str, rank: int, kind: str) -> Path:
    try:
        checked_part(shard, "shard name")
    except ContractError as error:
        raise ArenaError(str(error)) from None
    return directory / deployment / f"{shard}.{rank}.{kind}"
