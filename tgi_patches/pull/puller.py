"""Fetches other hosts' records into arenas of this shard's own: what `POST /kv/pull` does."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

from tgi_patches.contract import (
    PROTOCOL_VERSION,
    BridgeMiss,
    Fingerprint,
    MissReason,
    PullReply,
    PullRequest,
)
from tgi_patches.key import signed
from tgi_patches.pull import PullLimits, log
from tgi_patches.pull.rings import PulledRings
from tgi_patches.pull.transfer import Pulled, Transfer

PULL_LIMIT_S = 600.0
"""Whatever the request says."""
REMEMBERED = 1024
"""Pulls whose copies are offered again, as long as they are there."""

_Source = tuple[str, int, str]
"""Shard, epoch, handle."""


class Puller:
    """One decode shard's.  Belongs to one event loop.

    The copies stand in `<shard>.pulled`, `pulled_bytes` for all ranks together, under an epoch that
    the replies name.  Pulls of the same record share one transfer.
    """

    def __init__(
        self,
        directory: Path,
        deployment: str,
        shard: str,
        fingerprint: Fingerprint,
        pulled_bytes: int,
        record_ttl_s: float,
        key: bytes,
        limits: PullLimits = PullLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._digest = int(fingerprint.digest(), 16)
        self._key = key
        self._limits = limits
        self._rings = PulledRings(directory, deployment, shard, fingerprint, pulled_bytes, record_ttl_s)
        self._turns = asyncio.Semaphore(limits.pulls_at_once)
        self._under_way: dict[_Source, asyncio.Future[Pulled | MissReason | None]] = {}
        self._pulled: OrderedDict[_Source, Pulled] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """Pulls by result: `ok`, or a MissReason."""

    async def pull(self, request: PullRequest) -> PullReply:
        """Never raises but for cancellation; `found` only where every rank's record is there."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            limited = replace(request, timeout_s=min(request.timeout_s, PULL_LIMIT_S))
            async with asyncio.timeout(limited.timeout_s):
                pulled = await self._pull(limited)
        except BridgeMiss as miss:
            return self._missed(request, miss.reason, str(miss))
        except TimeoutError:
            return self._missed(request, MissReason.LINK, f"not done within {request.timeout_s} s")
        except Exception as error:  # noqa: BLE001 - whatever it is, decode can prefill by itself
            return self._missed(request, MissReason.ERROR, repr(error))
        self.counts["ok"] += 1
        return PullReply(
            PROTOCOL_VERSION,
            request.handle,
            found=True,
            shard=self._rings.shard,
            epoch=pulled.epoch,
            kv_bytes=pulled.kv_bytes,
            seconds=loop.time() - start_s,
        )

    def close(self) -> None:
        """Let go of the arenas; a pull under way ends with a miss."""
        self._rings.close()
        self._pulled.clear()

    def _missed(self, request: PullRequest, reason: MissReason, detail: str) -> PullReply:
        self.counts[reason] += 1
        log.warn("pull_missed", handle=request.handle, address=request.address, why=detail)
        return PullReply(PROTOCOL_VERSION, request.handle, found=False, reason=reason)

    async def _pull(self, request: PullRequest) -> Pulled:
        """Raises BridgeMiss."""
        if not signed(self._key, request.signature, *request.signed()):
            raise BridgeMiss(MissReason.UNSUPPORTED, "the request is not signed with this deployment's key")
        source = request.shard, request.epoch, request.handle
        while True:
            if (pulled := self._present(source)) is not None:
                return pulled
            if (other := self._under_way.get(source)) is None:
                return await self._lead(source, request)
            outcome = await asyncio.shield(other)
            if isinstance(outcome, MissReason):
                raise BridgeMiss(outcome, "found by another pull of the same record")
            if outcome is not None:
                return outcome

    async def _lead(self, source: _Source, request: PullRequest) -> Pulled:
        """Transfer it for all who want it; where this pull ends too early, another of them goes on."""
        told = self._under_way[source] = asyncio.get_running_loop().create_future()
        outcome: Pulled | MissReason | None = None
        try:
            async with self._turns:
                outcome = await Transfer(request, self._digest, self._key, self._limits, self._rings).run()
            self._remember(source, outcome)
            return outcome
        except BridgeMiss as miss:
            outcome = miss.reason
            raise
        finally:
            del self._under_way[source]
            told.set_result(outcome)

    def _remember(self, source: _Source, pulled: Pulled) -> None:
        self._pulled[source] = pulled
        if len(self._pulled) > REMEMBERED:
            self._pulled.popitem(last=False)

    def _present(self, source: _Source) -> Pulled | None:
        """What an earlier pull left, if a reader could use every rank of it now."""
        pulled, rings = self._pulled.get(source), self._rings.current
        if pulled is None:
            return None
        handle = source[2]
        try:
            if rings is not None and rings.epoch == pulled.epoch:
                found = [rings.bridges[rank].own_lookup(handle) for rank in range(len(pulled.sequences))]
                if tuple([record.sequence for record in found]) == pulled.sequences:
                    return pulled
        except BridgeMiss:
            pass
        del self._pulled[source]
        return None
