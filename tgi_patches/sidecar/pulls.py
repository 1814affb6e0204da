"""Records to and from other hosts: both ends of `tgi_patches.pull`, which need to know what a shard holds.

A shard's fingerprint is known once its server has finished its warmup; before that there is nothing to
offer, and nothing can be fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_patches.contract import (
    PROTOCOL_VERSION,
    BridgeMiss,
    Fingerprint,
    MissReason,
    PullReply,
    PullRequest,
    ShardSpec,
)
from tgi_patches.key import listen_address

if TYPE_CHECKING:
    from tgi_patches.pull.puller import Puller
    from tgi_patches.pull.source import ArenaSource, Offer

ToldFingerprint = Callable[[], Fingerprint | None]


class AwaitedSource:
    """A pull server's Source that finds nothing until the shard is armed."""

    def __init__(self, spec: ShardSpec, epoch: int, fingerprint: ToldFingerprint) -> None:
        self.shard = spec.shard
        self._spec = spec
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._source: ArenaSource | None = None

    @property
    def digest(self) -> int:
        source = self._opened()
        return 0 if source is None else source.digest

    def find(self, epoch: int, handle: str, rank: int) -> Offer:
        source = self._opened()
        if source is None:
            raise BridgeMiss(MissReason.MISSING, "the server has not finished its warmup")
        return source.find(epoch, handle, rank)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _opened(self) -> ArenaSource | None:
        if self._source is None and (fingerprint := self._fingerprint()) is not None:
            from tgi_patches.pull.source import ArenaSource

            spec = self._spec
            self._source = ArenaSource(
                Path(spec.arena_dir),
                spec.deployment,
                spec.shard,
                self._epoch,
                fingerprint,
                spec.tensor_parallel,
            )
        return self._source


class AwaitedPuller:
    """Makes the Puller with the first pull after the shard is armed."""

    def __init__(self, spec: ShardSpec, fingerprint: ToldFingerprint, key: bytes) -> None:
        self._spec = spec
        self._fingerprint = fingerprint
        self._key = key
        self._puller: Puller | None = None

    async def pull(self, request: PullRequest) -> PullReply:
        """See Puller.pull; `unsupported` from a shard that fetches nothing, or not yet."""
        puller = self._opened()
        if puller is None:
            reason = MissReason.UNSUPPORTED
            return PullReply(PROTOCOL_VERSION, request.handle, found=False, reason=reason)
        return await puller.pull(request)

    def close(self) -> None:
        if self._puller is not None:
            self._puller.close()

    def _opened(self) -> Puller | None:
        spec = self._spec
        if self._puller is None and spec.pulled_bytes and (fingerprint := self._fingerprint()) is not None:
            from tgi_patches.pull.puller import Puller

            self._puller = Puller(
                Path(spec.arena_dir),
                spec.deployment,
                spec.shard,
                fingerprint,
                spec.pulled_bytes,
                spec.record_ttl_s,
                self._key,
            )
        return self._puller


@asynccontextmanager
async def offering(
    spec: ShardSpec, epoch: int, fingerprint: ToldFingerprint, key: bytes
) -> AsyncIterator[int]:
    """The port at which other hosts pull, for the block; 0 for a shard that offers nothing.

    Raises ContractError for an address that is none, OSError for one that cannot be listened on.
    """
    if not spec.pull_listen:
        yield 0
        return
    from tgi_patches.pull.server import PullServer

    source = AwaitedSource(spec, epoch, fingerprint)
    try:
        async with PullServer(source, key).serving(*listen_address(spec.pull_listen)) as port:
            yield port
    finally:
        source.close()
