"""The arenas that hold a shard's copies of other hosts' records: one per rank of their writer.

They are made when the first record comes, all of one size, and made anew under another epoch when a
shard of more ranks shows up: then every copy is gone, which costs local prefills and nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.layout import RECORD_SHARE
from tgi_patches.contract import (
    PULLED_SUFFIX,
    BridgeMiss,
    ContractError,
    Fingerprint,
    MissReason,
    new_epoch,
)
from tgi_patches.pull import log
from tgi_patches.pull.budget import Budget

OPEN_SHARE = 2
"""Of a ring, one part in so many may be reserved and not yet published."""


@dataclass(frozen=True, slots=True)
class Rings:
    """By rank; all of one epoch."""

    epoch: int
    bridges: tuple[ArenaBridge, ...]
    budgets: tuple[Budget, ...]

    def close(self) -> None:
        for bridge in self.bridges:
            bridge.close()


class PulledRings:
    """`pulled_bytes` for all ranks together, as `<shard>.pulled` in the deployment's arenas."""

    def __init__(
        self,
        directory: Path,
        deployment: str,
        shard: str,
        fingerprint: Fingerprint,
        pulled_bytes: int,
        record_ttl_s: float,
    ) -> None:
        self._directory = directory
        self._deployment = deployment
        self.shard = shard + PULLED_SUFFIX
        self._fingerprint = fingerprint
        self._pulled_bytes = pulled_bytes
        self._record_ttl_s = record_ttl_s
        self._making: tuple[int, asyncio.Future[Rings]] | None = None
        """For how many ranks, and the rings once they are there."""
        self._closed = False

    @property
    def current(self) -> Rings | None:
        """None until they are made."""
        if self._making is None:
            return None
        made = self._making[1]
        there = made.done() and not made.cancelled() and made.exception() is None
        return made.result() if there else None

    def check(self, kv_bytes: int, ranks: int) -> None:
        """Raise BridgeMiss LAYOUT for a rank's record that no ring could hold, UNSUPPORTED for any."""
        if not self._pulled_bytes or self._closed:
            raise BridgeMiss(MissReason.UNSUPPORTED, "this shard pulls nothing")
        limit = self._pulled_bytes // max(ranks, self._ranks) // RECORD_SHARE
        if kv_bytes > limit:
            raise BridgeMiss(
                MissReason.LAYOUT, f"a record of {kv_bytes} bytes, over {limit} of the pulled ring"
            )

    async def of(self, ranks: int) -> Rings:
        """At least so many; made in another thread, since a large one takes seconds.  Raises BridgeMiss."""
        if self._closed:
            raise BridgeMiss(MissReason.UNSUPPORTED, "closed")
        if ranks > self._ranks:
            self._remake(ranks)
        making = self._making
        assert making is not None
        try:
            return await asyncio.shield(making[1])
        except (ArenaError, ContractError) as error:
            if self._making is making:
                self._making = None
            log.warn("pulled_ring_failed", error=str(error))
            raise BridgeMiss(MissReason.ERROR, str(error)) from None

    def close(self) -> None:
        """Whatever is being written to them is lost."""
        self._closed = True
        self._drop()

    @property
    def _ranks(self) -> int:
        return 0 if self._making is None else self._making[0]

    def _remake(self, ranks: int) -> None:
        self._drop()
        loop = asyncio.get_running_loop()
        self._making = ranks, loop.run_in_executor(None, self._make, ranks, new_epoch())

    def _drop(self) -> None:
        """Also what is still being made."""
        if (rings := self.current) is not None:
            rings.close()
        elif self._making is not None:
            self._making[1].add_done_callback(_close_made)
        self._making = None

    def _make(self, ranks: int, epoch: int) -> Rings:
        """In a thread of its own.  Raises ArenaError, ContractError (a shard's name is too long)."""
        ring_bytes = self._pulled_bytes // ranks
        made: list[ArenaBridge] = []
        try:
            for rank in range(ranks):
                made.append(  # noqa: PERF401 - those that were made are closed when one fails
                    ArenaBridge(
                        self._directory,
                        self._deployment,
                        self.shard,
                        rank,
                        epoch,
                        self._fingerprint,
                        ring_bytes,
                        self._record_ttl_s,
                    )
                )
        except BaseException:
            for bridge in made:
                bridge.close()
            raise
        return Rings(epoch, tuple(made), tuple([Budget(ring_bytes // OPEN_SHARE) for _ in made]))


def _close_made(making: asyncio.Future[Rings]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
