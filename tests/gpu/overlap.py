"""Exports beside a busy compute stream, and beside CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.bed import Bed, noise, scattered

SLOTS = 16384
TOKENS = 7168
"""At 64 KiB each: 448 MiB, a little less than a quarter of the ring."""


def beside_compute(bed: Bed) -> dict[str, Any]:
    """The compute stream's time with a large copy under way and without one, and who waited for whom."""
    bed.needs_gpu()
    registered = bed.register()
    shape = (SLOTS, 1, 8, 128)
    cache = [
        (noise(torch.float16, shape, bed.device, i), noise(torch.float16, shape, bed.device, i + 99))
        for i in range(16)
    ]
    pool = bed.pool(cache)
    tokens = bed.fitting(16 * 2 * 8 * 128 * 2, TOKENS)
    slots = scattered(tokens, SLOTS)
    matrix = torch.randn(4096, 4096, device=bed.device, dtype=torch.float16)

    def compute() -> None:
        for _ in range(60):
            torch.mm(matrix, matrix)

    compute()
    torch.cuda.synchronize()
    alone_ms = _compute_ms(compute)
    gather_ms = _compute_ms(lambda: pool.gathered(slots))
    started_s = time.perf_counter()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    handle = bed.next_handle()
    pool.export(slots, bed.reserve(handle, tokens), bed.raised)
    compute()
    after.record()
    host_ms = (time.perf_counter() - started_s) * 1e3
    after.synchronize()
    copy_was_under_way = not pool.copies._under_way[0].ready()
    pool.close()
    beside_ms = before.elapsed_time(after)
    record = bed.reader.lookup("p", 1, handle)
    return {
        "registered": registered,
        "kv_bytes": record.kv_bytes,
        "compute_alone_ms": alone_ms,
        "gather_ms": gather_ms,
        "gather_and_compute_beside_copy_ms": beside_ms,
        "ratio_to_gather_and_compute": beside_ms / (alone_ms + gather_ms),
        "host_was_busy_ms": host_ms,
        "copy_still_under_way_when_compute_ended": copy_was_under_way,
    }


def _compute_ms(work: Any) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def after_a_capture(bed: Bed) -> dict[str, Any]:
    """As in TGI: graphs are captured, then the arena is registered, then both are used together."""
    bed.needs_gpu()
    shape = (4096, 1, 8, 128)
    cache = [(noise(torch.bfloat16, shape, bed.device, 1), noise(torch.bfloat16, shape, bed.device, 2))]
    static = torch.zeros(1024, device=bed.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        static.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
    static.zero_()
    registered = bed.register()
    pool = bed.pool(cache)
    tokens = bed.fitting(2 * 8 * 128 * 2, 2048)
    slots = scattered(tokens, 4096)
    for _ in range(10):
        pool.export(slots, bed.reserve(bed.next_handle(), tokens), bed.raised)
        graph.replay()
        pool.poll()
    pool.close()
    torch.cuda.synchronize()
    replayed = int(static[0])
    if replayed != 10:
        raise AssertionError(f"the graph ran {replayed} times instead of 10")
    return {"registered": registered, "replays": replayed, "published": pool.copies.counts["finished"]}
