"""Pinned buffers: lent once at a time, kept for the next, never while a device is busy with them."""

from __future__ import annotations

from tgi_patches.device.pinned import KEPT, PinnedBuffers
from tgi_patches.device.streams import StepEvent, StepStreams

MEBIBYTE = 1 << 20


def test_a_buffer_is_lent_to_one_at_a_time_and_kept() -> None:
    buffers = PinnedBuffers(StepStreams())
    first, second = buffers.take(100), buffers.take(100)
    assert first.data_ptr() != second.data_ptr()
    assert first.numel() == MEBIBYTE
    buffers.give_back(first)
    assert buffers.take(MEBIBYTE).data_ptr() == first.data_ptr()


def test_a_smaller_one_does_not_serve() -> None:
    buffers = PinnedBuffers(StepStreams())
    buffers.give_back(buffers.take(1))
    assert buffers.take(MEBIBYTE + 1).numel() == 2 * MEBIBYTE


def test_one_that_the_device_is_busy_with_is_passed_over() -> None:
    streams = StepStreams()
    buffers = PinnedBuffers(streams)
    event = StepEvent(streams)
    busy = buffers.take(1)
    buffers.give_back(busy, busy_until=event)
    assert buffers.take(1).data_ptr() != busy.data_ptr()
    event.done = True
    assert buffers.take(1).data_ptr() == busy.data_ptr()


def test_the_largest_are_kept_and_no_more_than_a_few() -> None:
    streams = StepStreams()
    buffers = PinnedBuffers(streams)
    lent = [buffers.take(size * MEBIBYTE) for size in range(1, KEPT + 3)]
    for buffer in lent:
        buffers.give_back(buffer)
    sizes = [buffers.take(1).numel() // MEBIBYTE for _ in range(KEPT + 1)]
    assert sizes == [*range(3, KEPT + 3), 1]


def test_at_the_end_the_device_is_waited_for() -> None:
    streams = StepStreams()
    buffers = PinnedBuffers(streams)
    buffer = buffers.take(1)
    event = streams.copy(buffer[:4], buffer[4:8], streams.mark())
    buffers.give_back(buffer, busy_until=event)
    buffers.close()
    assert event.query()
    assert buffers.take(1) is not buffer
