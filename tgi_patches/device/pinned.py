"""Pinned host buffers, kept from record to record: pinning costs more than the copy.

A buffer that the device still reads is lent out again only when it is done with it.
"""

from __future__ import annotations

from torch import Tensor

from tgi_patches.device.streams import Event, Streams

KEPT = 4
_GRAIN = 1 << 20


class PinnedBuffers:
    """`take` and `give_back`; sizes are rounded up, so that records of about one size share buffers."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: list[tuple[Tensor, Event | None]] = []

    def take(self, size_bytes: int) -> Tensor:
        """At least `size_bytes` of uint8 that nobody uses."""
        for at, (buffer, busy_until) in enumerate(self._free):
            if buffer.numel() >= size_bytes and (busy_until is None or busy_until.query()):
                del self._free[at]
                return buffer
        return self._streams.pinned(-(-max(size_bytes, 1) // _GRAIN) * _GRAIN)

    def give_back(self, buffer: Tensor | None, busy_until: Event | None = None) -> None:
        """The largest ones are kept; torch waits for the device before it frees pinned memory."""
        if buffer is None:
            return
        self._free.append((buffer, busy_until))
        if len(self._free) > KEPT:
            self._free.remove(min(self._free, key=lambda kept: kept[0].numel()))

    def close(self) -> None:
        """Wait for the device to be done with all of them and let go."""
        for _, busy_until in self._free:
            if busy_until is not None:
                busy_until.synchronize()
        self._free.clear()
