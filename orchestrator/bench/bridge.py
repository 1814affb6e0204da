"""What a record costs on the bridge, against memcpy and against a safetensors file per record.

All ways take turns in every round and report medians, so the ratios hold where absolute times do
not.  Time is this thread's CPU time: the process's would count torch's idle workers as well.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import Fingerprint, new_epoch, new_handle
from tgi_patches.kv import planes, runs

LAYERS = 30
HEADS = 3
HEAD_DIM = 64
BLOCK = 16
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 4
COLD_BYTES = 96 * 2**20
"""Every buffer's turn comes again after so much at least: more than the caches hold."""
RING_RECORDS = 4
IMPORT_LAG = 2
"""Rounds between a record's export and its import: right after it, the caches still hold a part."""

Pools = list[tuple[torch.Tensor, torch.Tensor]]
Timed = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Ratios:
    """One record size; ratios are speeds against memcpy of the same bytes (1.0 is as fast)."""

    kv_bytes: int
    tokens: int
    consecutive: bool
    """Whether the prompt's slots were one run, or scattered blocks of 16."""
    memcpy_gb_s: float
    export: float
    import_: float
    """Lookup included."""
    file_save: float
    """Of one flat tensor: gathering the planes would come on top."""
    file_load: float
    """Into a flat buffer: scattering would come on top."""
    export_over_file: float
    import_over_file: float


def measure(sizes_bytes: Sequence[int], rounds: int = 9) -> list[dict[str, object]]:
    """One row per size and slot order, with the fields of Ratios.

    The pools are those of SmolLM2-135M in fp32; sizes are rounded down to whole tokens.
    """
    with tempfile.TemporaryDirectory(prefix="tgi-orchestrator-bench-", dir=_memory()) as folder, _quiet():
        return [
            asdict(_measure_one(Path(folder), max(BLOCK, size // TOKEN_BYTES), rounds, consecutive))
            for size in sizes_bytes
            for consecutive in (True, False)
        ]


def _measure_one(folder: Path, tokens: int, rounds: int, consecutive: bool) -> Ratios:
    kv_bytes = tokens * TOKEN_BYTES
    copies = max(1, -(-COLD_BYTES // kv_bytes))
    ring_bytes = max(copies, RING_RECORDS) * (kv_bytes + 8 * tokens)
    bridge = ArenaBridge(folder / "arenas", "bench", "p", 0, new_epoch(), _fingerprint(), ring_bytes, 600.0)
    try:
        times = _rounds(bridge, folder / "record.safetensors", _Buffers(tokens, copies, consecutive), rounds)
    finally:
        bridge.close()
    median_s = {way: statistics.median(column) for way, column in times.items()}
    memcpy_s = median_s["memcpy"]
    return Ratios(
        kv_bytes=kv_bytes,
        tokens=tokens,
        consecutive=consecutive,
        memcpy_gb_s=kv_bytes / memcpy_s / 1e9,
        export=memcpy_s / median_s["export"],
        import_=memcpy_s / median_s["import"],
        file_save=memcpy_s / median_s["save"],
        file_load=memcpy_s / median_s["load"],
        export_over_file=median_s["save"] / median_s["export"],
        import_over_file=median_s["load"] / median_s["import"],
    )


class _Buffers:
    """As many copies of everything as it takes to find each one cold; all hold touched pages."""

    def __init__(self, tokens: int, copies: int, consecutive: bool) -> None:
        slots = runs(_slots(tokens, consecutive))
        self.tokens = tokens
        self.pools = [_pools(tokens) for _ in range(2 * copies)]
        sides = [planes(pools, slots) for pools in self.pools]
        self.sources, self.targets = cycle(sides[:copies]), cycle(sides[copies:])
        self.flat = [torch.rand(tokens * TOKEN_BYTES // 4) for _ in range(2 * copies)]
        self.plain = cycle(self.flat[:copies])
        self.copies = cycle([tensor.numpy().data.cast("B") for tensor in self.flat[copies:]])


def _rounds(bridge: ArenaBridge, path: Path, buffers: _Buffers, rounds: int) -> Timed:
    """Seconds of each way in each round; the first round warms up and does not count."""
    times: Timed = {"memcpy": [], "export": [], "import": [], "save": [], "load": []}
    handles = deque(new_handle() for _ in range(IMPORT_LAG))
    for handle in handles:
        _export(bridge, handle, buffers)
    for _ in range(rounds + 1):
        handles.append(new_handle())
        for way, call in _ways(bridge, path, buffers, handles[-1], handles.popleft()):
            start = time.thread_time()
            call()
            times[way].append(time.thread_time() - start)
        path.unlink()
    return {way: column[1:] for way, column in times.items()}


def _ways(
    bridge: ArenaBridge, path: Path, buffers: _Buffers, new: str, old: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed in one round, in turn: `new` is exported, `old` imported."""
    plain, copy = next(buffers.plain).numpy().data.cast("B"), next(buffers.copies)
    tensor, loaded, target = next(buffers.plain), next(buffers.copies), next(buffers.targets)
    yield "memcpy", lambda: _copy(copy, plain)
    yield "export", lambda: _export(bridge, new, buffers)
    yield "import", lambda: bridge.read_into(bridge.own_lookup(old), target, buffers.tokens)
    yield "save", lambda: save_file({"kv": tensor}, path)
    yield "load", lambda: _copy(loaded, load_file(path)["kv"].numpy().data.cast("B"))


def _export(bridge: ArenaBridge, handle: str, buffers: _Buffers) -> None:
    bridge.export(handle, range(buffers.tokens), FirstToken(1, 0.0), False, next(buffers.sources))


def _copy(target: memoryview, source: memoryview) -> None:
    target[:] = source


@contextmanager
def _quiet() -> Iterator[None]:
    """One torch thread and no garbage collection in between; both as before afterwards."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        torch.set_num_threads(threads)


def _pools(tokens: int) -> Pools:
    blocks = 2 * -(-tokens // BLOCK)
    shape = (blocks, BLOCK, HEADS, HEAD_DIM)
    return [(torch.rand(shape), torch.rand(shape)) for _ in range(LAYERS)]


def _slots(tokens: int, consecutive: bool) -> list[int]:
    """Slots of a prompt: one stretch, or every second block of the pool."""
    if consecutive:
        return list(range(tokens))
    return [slot // BLOCK * 2 * BLOCK + slot % BLOCK for slot in range(tokens)]


def _fingerprint() -> Fingerprint:
    return Fingerprint("bench", "", "", "float32", "float32", LAYERS, HEADS, HEAD_DIM)


def _memory() -> str | None:
    """The tmpfs that arenas live in; None leaves it to the system's temporary folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
