"""A paged KV cache on a device, moved to and from host memory beside the compute stream.

Export: gather (compute stream) -> event -> copy to the host (copy stream) -> event -> publish.
Import: record -> pinned buffer, verified -> copy to the device (copy stream) -> event -> scatter (compute).
Bytes are moved as words, so every dtype works, fp8 included.  One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tgi_patches.bridge import Planes, Reservation
from tgi_patches.contract import BridgeMiss, MissReason
from tgi_patches.device.memory import tensor_over
from tgi_patches.device.pending import Copies, Pending
from tgi_patches.device.pinned import PinnedBuffers
from tgi_patches.device.streams import Event, Streams
from tgi_patches.heads import Share
from tgi_patches.kv.staged import planes_of

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Reserve = Callable[[Sequence[int]], Reservation]
"""From the bytes of every plane to a place for them; may raise BridgeMiss."""
Done = Callable[[BridgeMiss | None], None]
"""Told once, when the record is published or will not be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`deadline_s` for one copy; `bytes_max` under way: at most a quarter of the ring.

    Records are a quarter of the ring too, so that a reservation is never overtaken while it is filled.
    What is under way is twice on the device: in TGI's cache, and gathered in memory of its own.
    """

    deadline_s: float = 5.0
    bytes_max: int = 1 << 30


class DevicePool:
    """`kv_cache` holds one (K, V) pair per layer, each `[blocks, block, heads, dim]` and contiguous.

    `direct(memory)` tells whether the device may write there itself.
    Raises BridgeMiss LAYOUT for any other cache.
    """

    def __init__(
        self,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        streams: Streams,
        *,
        direct: Callable[[memoryview], bool] = lambda memory: False,  # noqa: ARG005 - a default of one word
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flat = flat([pool for pair in kv_cache for pool in pair])
        self._streams = streams
        self._direct = direct
        self._limits = limits
        self._clock = clock
        self._buffers = PinnedBuffers(streams)
        self.copies = Copies(limits.bytes_max)

    @property
    def row_bytes(self) -> list[int]:
        """Of one token in every plane."""
        return [plane.shape[1] * plane.shape[2] * plane.element_size() for plane in self._flat]

    # --- export ---

    def export(self, slots: Sequence[int], reserve: Reserve, done: Done) -> None:
        """Copy the slots' KV away and publish it when it has arrived; the slots are free on return.

        Raises BridgeMiss, and then never calls `done`: ERROR while an abandoned copy may still write to
        the ring, or what `reserve` raises.
        """
        self._check_free()
        plane_bytes = [row * len(slots) for row in self.row_bytes]
        self.copies.make_room(sum(plane_bytes))
        reservation = reserve(plane_bytes)
        try:
            staging = self.gathered(slots)
            self._start(_Outgoing(reservation, done), staging, self._streams.mark())
        except BaseException:
            reservation.abandon()
            raise

    def _start(self, outgoing: _Outgoing, staging: Tensor, gathered: Event) -> None:
        size_bytes = staging.numel()
        data = outgoing.reservation.data
        if self._direct(data):
            target = tensor_over(data)
        else:
            target = outgoing.buffer = self._buffers.take(size_bytes)
        event = self._streams.copy(target[:size_bytes], staging, gathered)

        def finish() -> None:
            outgoing.finish()
            self._buffers.give_back(outgoing.buffer)

        def abandoned() -> None:  # the buffer is not given back: the device may still write to it
            outgoing.late(self._limits.deadline_s)

        self.copies.add(
            Pending(
                ready=event.query,
                finish=finish,
                deadline_s=self._clock() + self._limits.deadline_s,
                size_bytes=size_bytes,
                wait=event.synchronize,
                abandoned=abandoned,
            )
        )

    def outbox(self, slots: Sequence[int]) -> Planes:
        """As StagedPool's, for an export at once: waits for the device.  Raises as `export`."""
        self._check_free()
        staging = self.gathered(slots)
        buffer = self._buffers.take(staging.numel())
        self._streams.copy(buffer[: staging.numel()], staging, self._streams.mark()).synchronize()
        self._buffers.give_back(buffer)
        return planes_of(self._planes(buffer, len(slots), [plane.shape[1] for plane in self._flat]))

    def _check_free(self) -> None:
        if self.copies.stuck:
            raise BridgeMiss(MissReason.ERROR, "an earlier copy to the host never ended")

    def gathered(self, slots: Sequence[int]) -> Tensor:
        """The slots' rows of every plane, one plane after another, uint8 on the device."""
        index = self._streams.upload(slots)
        staging = self._streams.empty(sum(self.row_bytes) * len(slots))
        planes = self._planes(staging, len(slots), [plane.shape[1] for plane in self._flat])
        for pool, plane in zip(self._flat, planes, strict=True):
            torch.index_select(pool, 0, index, out=plane)
        return staging

    # --- import ---

    def inbox(self, slots: Sequence[int], first: int = 0, share: Share | None = None) -> DeviceInbox:
        """For the given slots, of which those before position `first` are left alone.

        With a `share`, the record holds `share.heads` heads and only the shared ones are taken.
        """
        share = share or Share(0, self._flat[0].shape[1], 0, 0, self._flat[0].shape[1], whole=True)
        heads = [share.heads] * len(self._flat)
        row_bytes = [share.heads * plane.shape[2] * plane.element_size() for plane in self._flat]
        return DeviceInbox(
            pools=[plane[:, share.ours : share.ours + share.count] for plane in self._flat],
            streams=self._streams,
            buffers=self._buffers,
            slots=slots,
            first=first,
            share=share,
            size_bytes=sum(row_bytes) * len(slots),
            cut=lambda memory: self._planes(memory, len(slots), heads),
        )

    def _planes(self, memory: Tensor, tokens: int, heads: Sequence[int]) -> list[Tensor]:
        """`memory`, uint8, as one `[tokens, heads, words]` per plane."""
        shapes = [(tokens, count, plane.shape[2]) for count, plane in zip(heads, self._flat, strict=True)]
        words = memory.view(self._flat[0].dtype)
        ends = list(accumulate(rows * count * width for rows, count, width in shapes))
        return [
            words[start:end].view(shape) for start, end, shape in zip([0, *ends], ends, shapes, strict=False)
        ]

    # --- the end ---

    def poll(self) -> None:
        """See Copies.poll."""
        self.copies.poll(self._clock())

    def close(self) -> None:
        """Wait for what is under way: memory may be unmapped, or graphs captured, afterwards."""
        self.copies.drain()
        self._buffers.close()


@dataclass(slots=True)
class _Outgoing:
    """A record whose bytes are on their way to the host."""

    reservation: Reservation
    done: Done
    buffer: Tensor | None = None
    """Where they arrive when not in the ring itself."""

    def finish(self) -> None:
        try:
            if self.buffer is not None:
                self._deliver(self.buffer)
            self.reservation.publish()
        except BridgeMiss as miss:
            self.reservation.abandon()
            self.done(miss)
        else:
            self.done(None)

    def _deliver(self, buffer: Tensor) -> None:
        if not self.reservation.valid:
            raise BridgeMiss(MissReason.OVERWRITTEN, "the ring went past it while it was being copied")
        data = self.reservation.data
        data[:] = buffer[: data.nbytes].numpy().data

    def late(self, deadline_s: float) -> None:
        self.reservation.abandon()
        self.done(BridgeMiss(MissReason.ERROR, f"the copy to the host took over {deadline_s:g} s"))


@dataclass(slots=True)
class DeviceInbox:
    """An Inbox whose tokens go through pinned memory and device memory into the pool on commit."""

    pools: list[Tensor]
    """`[slots, heads, words]` of the heads that are taken."""
    streams: Streams
    buffers: PinnedBuffers
    slots: Sequence[int]
    first: int
    share: Share
    size_bytes: int
    cut: Callable[[Tensor], list[Tensor]]
    buffer: Tensor | None = None
    last_kv: list[Tensor] | None = None

    @property
    def planes(self) -> Planes:
        """Pinned memory; garbage until it is filled."""
        if self.buffer is None:
            self.buffer = self.buffers.take(self.size_bytes)
        return planes_of(self.cut(self.buffer[: self.size_bytes]))

    def commit(self) -> None:
        """Everything arrived in `planes` and was verified there.  The host waits for nothing."""
        assert self.buffer is not None, "nothing was read into it"
        buffer, self.buffer = self.buffer, None
        staging = self.streams.empty(self.size_bytes)
        event = self.streams.copy(staging, buffer[: self.size_bytes], self.streams.mark())
        self.buffers.give_back(buffer, busy_until=event)
        self._scatter(staging, event)

    def fetch(self, data: memoryview, check: Callable[[], None]) -> None:
        """In place of `planes` and `commit`: straight from a registered arena, all planes in `data`.

        `check` raises BridgeMiss where epoch or sequence have moved on.  It is asked after the copy has
        ended and before anything depends on it, so the host waits for the copy here.
        """
        staging = self.streams.empty(self.size_bytes)
        source = tensor_over(data)[: self.size_bytes]
        if source.numel() != self.size_bytes:
            raise BridgeMiss(MissReason.LAYOUT, f"{source.numel()} bytes instead of {self.size_bytes}")
        event = self.streams.copy(staging, source, self.streams.mark())
        event.synchronize()
        check()
        self._scatter(staging, event)

    def accept(self, planes: Tensor) -> None:
        """In place of `planes` and `commit`: from device memory, where a link has put the record."""
        if planes.numel() != self.size_bytes:
            raise BridgeMiss(MissReason.LAYOUT, f"{planes.numel()} bytes instead of {self.size_bytes}")
        self._scatter(planes, self.streams.mark())

    def repair(self) -> None:
        """See Inbox.repair; the row was kept on the device."""
        if self.last_kv is None:
            return
        index = self.streams.upload(self.slots[-1:])
        for pool, row in zip(self.pools, self.last_kv, strict=True):
            pool.index_copy_(0, index, row)

    def _scatter(self, staging: Tensor, arrived: Event) -> None:
        self.streams.follow(arrived)
        taken = slice(self.share.theirs, self.share.theirs + self.share.count)
        planes = [plane[:, taken] for plane in self.cut(staging)]
        index = self.streams.upload(self.slots[self.first :])
        for pool, plane in zip(self.pools, planes, strict=True):
            pool.index_copy_(0, index, plane[self.first :])
        self.last_kv = [plane[-1:].clone() for plane in planes]


def flat(pools: Sequence[Tensor]) -> list[Tensor]:
    """Each pool as `[slots, heads, words]`, all of one word size: planes then follow without gaps."""
    for pool in pools:
        if pool.dim() != 4 or not pool.is_contiguous():
            raise BridgeMiss(MissReason.LAYOUT, f"a KV cache of shape {tuple(pool.shape)} is unknown")
    rows = [pool.shape[3] * pool.element_size() for pool in pools]
    word = next(word for size, word in _WORDS if not any(row % size for row in rows))
    return [pool.view(word).flatten(0, 1) for pool in pools]
