"""The device path of one server, as its hooks use it: from the end of Warmup to the next one.

    made -> armed (after Warmup: the ring is registered) -> forgotten (before a later Warmup) -> armed ...

Exports only between `armed` and `forget`: no CUDA call of ours is under way while TGI captures its graphs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from tgi_patches.contract import BridgeMiss, MissReason
from tgi_patches.device.pending import LoopPoller, Timer
from tgi_patches.device.pool import DevicePool, Done, Limits, Reserve
from tgi_patches.device.registration import Registrar, TorchRuntime
from tgi_patches.device.streams import CudaStreams, Streams

VARIABLE = "ORCHESTRATOR_TGI_DEVICE_PATH"
"""`1` turns it on; without it KV is copied synchronously, by kv/staged.py.  Until it has run on GPUs."""
_RING_SHARE = 4
"""Copies under way may fill so much of the ring, 1 / n."""
_STAGING_BYTES = 256 << 20
"""And so much of the device's memory, of which TGI's cache leaves little; one larger record goes alone."""


class DevicePath:
    """`loop`: the event loop of the server, asked for when a copy begins."""

    def __init__(
        self,
        streams: Streams,
        registrar: Registrar,
        loop: Callable[[], Timer] = asyncio.get_running_loop,
    ) -> None:
        self._streams = streams
        self._registrar = registrar
        self._loop = loop
        self._limits = Limits()
        self._armed = False
        self._pool: DevicePool | None = None
        self._pool_of: object = None
        self._poller: LoopPoller | None = None

    @classmethod
    def of(cls, device: torch.device, env: Mapping[str, str], warn: Callable[..., object]) -> Self | None:
        """None on anything but CUDA, and where `env` does not ask for it.  Makes no CUDA call."""
        if device.type != "cuda" or env.get(VARIABLE, "") != "1":
            return None
        return cls(CudaStreams(device), Registrar(TorchRuntime(device), warn))

    @property
    def counts(self) -> dict[str, int]:
        """For the report: copies finished, abandoned, waited for; registrations."""
        copies = self._pool.copies.counts if self._pool is not None else {}
        return dict(copies) | dict(self._registrar.counts)

    def armed(self, ring: memoryview | None, ring_bytes: int) -> None:
        """Warmup returned.  `ring`: the own arena's memory, None for a shard that only reads."""
        self._armed = True
        self._registrar.allow()
        self._limits = Limits(bytes_max=min(ring_bytes // _RING_SHARE, _STAGING_BYTES))
        if ring is not None:
            self._registrar.add(ring)

    def forget(self) -> None:
        """A Warmup comes: what is under way ends first, and nothing begins."""
        self._armed = False
        self._registrar.forbid()
        if self._pool is not None:
            self._pool.close()
        self._pool = self._pool_of = self._poller = None

    def close(self) -> None:
        """Before the arena is unmapped."""
        self.forget()
        self._registrar.close()

    def pool(self, kv_cache: object, pairs: Callable[[], Sequence[tuple[Tensor, Tensor]]]) -> DevicePool:
        """Of TGI's present `kv_cache`, whose K and V are `pairs`; a new list is a new pool.

        Raises BridgeMiss: UNSUPPORTED before Warmup, LAYOUT.
        """
        if not self._armed:
            raise BridgeMiss(MissReason.UNSUPPORTED, "the device path is not armed")
        if self._pool is None or self._pool_of is not kv_cache:
            if self._pool is not None:
                self._pool.close()
            covers = self._registrar.covers
            self._pool = DevicePool(pairs(), self._streams, direct=covers, limits=self._limits)
            self._pool_of = kv_cache
            self._poller = None
        return self._pool

    def export(self, pool: DevicePool, slots: Sequence[int], reserve: Reserve, done: Done) -> None:
        """See DevicePool.export; the server's loop looks after it from here."""
        pool.export(slots, reserve, done)
        if self._poller is None:
            self._poller = LoopPoller(self._loop(), pool.copies)
        self._poller.kick()

    def poll(self) -> None:
        """In every step: costs nothing while nothing is under way."""
        if self._pool is not None and len(self._pool.copies):
            self._pool.poll()
