"""An arena that the copy engine uses itself: what registering it costs, and what it brings."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from tests.gpu.bed import Bed, timed_ms
from tgi_patches.bridge.files import Mapping, arena_path, open_for_reading, read_layout
from tgi_patches.device.memory import tensor_over
from tgi_patches.device.registration import TorchRuntime

SIZES = (4 << 20, 64 << 20, 256 << 20)


def registration(bed: Bed) -> dict[str, Any]:
    """The own ring for reading and writing, and the same file as a peer maps it."""
    bed.needs_gpu()
    assert bed.registrar is not None
    started_s = time.perf_counter()
    own = bed.register()
    took_s = time.perf_counter() - started_s
    found: dict[str, Any] = {
        "own": own,
        "bytes": bed.ring.nbytes,
        "took_s": took_s,
        "gb_per_s": bed.ring.nbytes / took_s / 1e9,
        "pinned_for_torch": tensor_over(bed.ring)[:4096].is_pinned(),
        "reads_only_supported": TorchRuntime(bed.device).reads_only(),
    }
    fd = open_for_reading(arena_path(bed.folder / "arenas", "gpu", "p", 0))
    layout = read_layout(fd)
    assert layout is not None
    peer = Mapping(fd, layout, writable=False)
    started_s = time.perf_counter()
    found["peer"] = bed.registrar.add(peer.data)
    found["peer_took_s"] = time.perf_counter() - started_s
    source = tensor_over(peer.data)[:4096]
    found["peer_reads_right"] = bool(source.to(bed.device).cpu().equal(tensor_over(bed.ring)[:4096]))
    bed.registrar.remove(peer.data)
    del source
    peer.close()
    torch.ones(1, device=bed.device).add_(1)  # an error of ours would be raised here
    started_s = time.perf_counter()
    bed.registrar.remove(bed.ring)
    return found | {
        "unregister_s": time.perf_counter() - started_s,
        "counts": dict(bed.registrar.counts),
        "log": bed.log,
    }


def bandwidth(bed: Bed) -> dict[str, Any]:
    """GB/s of single copies, and the arena's ratio to torch's own pinned memory."""
    bed.needs_gpu()
    found: dict[str, Any] = {"registered": bed.register()}
    ring = tensor_over(bed.ring)
    for size in (size for size in SIZES if size + (1 << 20) <= ring.numel()):
        on_device = torch.empty(size, dtype=torch.uint8, device=bed.device)
        hosts = {
            "arena": ring[1 << 20 :][:size],
            "pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True),
            "pageable": torch.zeros(size, dtype=torch.uint8),
        }
        row: dict[str, Any] = {}
        for name, host in hosts.items():
            row[f"{name}_d2h"] = _rate(host, on_device)
            row[f"{name}_h2d"] = _rate(on_device, host)
        for way in ("d2h", "h2d"):
            for other in ("pinned", "pageable"):
                row[f"arena_to_{other}_{way}"] = row[f"arena_{way}"] / row[f"{other}_{way}"]
        found[f"{size >> 20} MiB"] = row
    return found


def _rate(target: Tensor, source: Tensor) -> float:
    return target.numel() / timed_ms(lambda: target.copy_(source, non_blocking=True)) / 1e6
