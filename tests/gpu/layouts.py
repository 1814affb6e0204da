"""TGI's cache layouts and dtypes through an arena and back: equal bytes, and how fast."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.bed import Bed, noise, scattered, timed_ms
from tgi_patches.contract import BridgeMiss
from tgi_patches.device.pool import DevicePool

BLOCKS = {"flashinfer": 1, "flashdecoding": 256}
DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def round_trips(bed: Bed) -> dict[str, Any]:
    """32 layers of 8 heads of 128 (Llama-3.1-8B) and 1024 tokens on a GPU; small ones without."""
    registered = bed.register()
    layers, heads, dim, wanted, slots = (32, 8, 128, 1024, 8192) if bed.on_gpu else (2, 2, 16, 40, 512)
    tokens = bed.fitting(layers * 2 * heads * dim * 2, wanted)
    found: dict[str, Any] = {"device": str(bed.device), "registered": registered, "tokens": tokens}
    for attention, block in BLOCKS.items():
        for dtype in DTYPES:
            shape = (slots // block, block, heads, dim)
            source, target = (
                [
                    (
                        noise(dtype, shape, bed.device, seed + i),
                        noise(dtype, shape, bed.device, seed + i + 500),
                    )
                    for i in range(layers)
                ]
                for seed in (1, 1000)
            )
            name = f"{attention} {str(dtype).removeprefix('torch.')}"
            found[name] = _round_trip(bed, source, target, tokens, slots)
    return found


def _round_trip(bed: Bed, source: Any, target: Any, tokens: int, slots: int) -> dict[str, Any]:
    leave, arrive = scattered(tokens, slots, 1), scattered(tokens, slots, 2)
    giver, taker = bed.pool(source), bed.pool(target)
    untouched = sorted(set(range(slots)) - set(arrive))
    before = [pool.clone() for pool in taker._flat]
    handle = bed.next_handle()
    started_s = time.perf_counter()
    giver.export(leave, bed.reserve(handle, tokens), bed.raised)
    returned_s = time.perf_counter() - started_s
    giver.close()
    exported_s = time.perf_counter() - started_s
    record = bed.reader.lookup("p", 1, handle)
    started_s = time.perf_counter()
    inbox = taker.inbox(arrive)
    bed.reader.read_into(record, inbox.planes, tokens)
    inbox.commit()
    taker.close()
    if bed.on_gpu:
        torch.cuda.synchronize()
    imported_s = time.perf_counter() - started_s
    equal = all(
        bool(theirs[leave].equal(ours[arrive]) and ours[untouched].equal(old[untouched]))
        for theirs, ours, old in zip(giver._flat, taker._flat, before, strict=True)
    )
    if not equal:
        raise AssertionError("what came back is not what was sent")
    return {
        "equal": equal,
        "kv_bytes": record.kv_bytes,
        "export_returned_ms": returned_s * 1e3,
        "export_published_ms": exported_s * 1e3,
        "import_ms": imported_s * 1e3,
        **_rates(bed, giver, leave, record.kv_bytes),
    }


def _rates(bed: Bed, pool: DevicePool, slots: list[int], kv_bytes: int) -> dict[str, float]:
    """Of the gather and the scatter alone, on the device."""
    if not bed.on_gpu:
        return {}
    staging = pool.gathered(slots)
    gather_ms = timed_ms(lambda: pool.gathered(slots))
    inbox = pool.inbox(slots)
    scatter_ms = timed_ms(lambda: inbox.accept(staging))
    return {"gather_gb_per_s": kv_bytes / gather_ms / 1e6, "scatter_gb_per_s": kv_bytes / scatter_ms / 1e6}


def publishing(bed: Bed) -> dict[str, Any]:
    """Nothing is found before its copy ended, records come in order, a repair puts the last row back."""
    bed.register()
    shape = (256, 1, 2, 64)
    cache = [(noise(torch.float16, shape, bed.device, 1), noise(torch.float16, shape, bed.device, 2))]
    pool = bed.pool(cache)
    handles = [bed.next_handle() for _ in range(6)]
    done: list[str] = []
    early = 0
    for number, handle in enumerate(handles):
        pool.export(
            range(number, number + 20),
            bed.reserve(handle, 20),
            lambda miss, handle=handle: done.append(handle if miss is None else str(miss)),
        )
        early += _found(bed, handle)
    pool.close()
    if done != handles or early:
        raise AssertionError(f"published {len(done)} of {len(handles)}, {early} too early")
    target = [(torch.zeros_like(key), torch.zeros_like(value)) for key, value in cache]
    taker = bed.pool(target)
    inbox = taker.inbox(range(20))
    bed.reader.read_into(bed.reader.lookup("p", 1, handles[3]), inbox.planes, 20)
    inbox.commit()
    target[0][0][19].zero_()
    inbox.repair()
    repaired = bool(target[0][0].view(torch.int16)[19].equal(cache[0][0].view(torch.int16)[22]))
    if not repaired:
        raise AssertionError("the last row was not put back")
    return {"in_order": True, "found_early": early, "repaired": repaired, "counts": dict(pool.copies.counts)}


def _found(bed: Bed, handle: str) -> int:
    try:
        bed.reader.lookup("p", 1, handle)
    except BridgeMiss:
        return 0
    return 1
