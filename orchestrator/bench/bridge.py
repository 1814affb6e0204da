"""What a record costs on the bridge, against memcpy and against a safetensors file per record.

Every way but memcpy starts from the slots of one paged pool and ends in those of another; ways take
turns and report medians of this thread's CPU time.  First memcpy and the arena alone, then with files
in between: they leave the caches cold, for Python too, as a forward in a shard does.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import Fingerprint, new_epoch, new_handle
from tgi_patches.kv.in_place import PoolBytes
from tgi_patches.kv.slots import runs

LAYERS = 30
HEADS = 3
HEAD_DIM = 64
BLOCK = 16
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 4
COLD_BYTES = 96 * 2**20
"""Every buffer's turn comes again after so much at least: more than the caches hold."""
RING_RECORDS = 4
WARM_ROUNDS = 3
"""Times as many of the rounds without files: they are short."""
IMPORT_LAG = 2
"""Rounds between a record's export and its import: right after it, the caches still hold a part."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """One record size; ratios are speeds against memcpy of the same bytes (1.0 is as fast)."""

    kv_bytes: int
    tokens: int
    consecutive: bool
    """Whether the prompt's slots were one run, or scattered blocks of 16."""
    memcpy_gb_s: float
    export: float
    """From slots to a published record."""
    import_: float
    """From a handle to filled slots: lookup included."""
    cold_export: float
    """After a file's turn; so is the next."""
    cold_import: float
    file_save: float
    """Gathered with the slots as an index, as paged code does."""
    file_load: float
    """Scattered likewise; the file's end included."""
    sliced_file_save: float
    """Gathered as slices of consecutive slots: the best that a file can do."""
    sliced_file_load: float
    over_file: float
    """Save and load together against cold export and import together."""
    over_sliced_file: float


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
        buffers = _Buffers(tokens, copies, consecutive)
        warm_s = _medians(bridge, None, buffers, WARM_ROUNDS * rounds)
        median_s = _medians(bridge, folder / "record.safetensors", buffers, rounds)
    finally:
        bridge.close()
    memcpy_s = median_s["memcpy"]
    ours_s = median_s["export"] + median_s["import"]
    return Ratios(
        kv_bytes=kv_bytes,
        tokens=tokens,
        consecutive=consecutive,
        memcpy_gb_s=kv_bytes / warm_s["memcpy"] / 1e9,
        export=warm_s["memcpy"] / warm_s["export"],
        import_=warm_s["memcpy"] / warm_s["import"],
        cold_export=memcpy_s / median_s["export"],
        cold_import=memcpy_s / median_s["import"],
        file_save=memcpy_s / median_s["save"],
        file_load=memcpy_s / median_s["load"],
        sliced_file_save=memcpy_s / median_s["save sliced"],
        sliced_file_load=memcpy_s / median_s["load sliced"],
        over_file=(median_s["save"] + median_s["load"]) / ours_s,
        over_sliced_file=(median_s["save sliced"] + median_s["load sliced"]) / ours_s,
    )


class _Side:
    """A shard's pools, every page touched, and where the prompt lies in them."""

    def __init__(self, slots: Sequence[int]) -> None:
        blocks = 2 * -(-len(slots) // BLOCK)
        shape = (blocks, BLOCK, HEADS, HEAD_DIM)
        pools = [(torch.rand(shape), torch.rand(shape)) for _ in range(LAYERS)]
        self.slots = tuple(slots)
        self.bytes = PoolBytes(pools)
        self._index = torch.tensor(slots)
        self._runs = [slice(start, start + length) for start, length in runs(slots)]
        self._rows = {
            f"{layer}.{kind}": pool.view(-1, HEADS, HEAD_DIM)
            for layer, pair in enumerate(pools)
            for kind, pool in zip("kv", pair, strict=True)
        }

    def planes(self) -> list[list[memoryview]]:
        """What a shard does for every record."""
        return self.bytes.planes(runs(self.slots))

    def save(self, path: Path, *, sliced: bool) -> None:
        gather = self._slices if sliced else self._indexed
        save_file({name: gather(rows) for name, rows in self._rows.items()}, path)

    def load(self, path: Path, *, sliced: bool) -> None:
        found = load_file(path)
        for name, rows in self._rows.items():
            if sliced:
                pieces = torch.split(found[name], [run.stop - run.start for run in self._runs])
                for run, piece in zip(self._runs, pieces, strict=True):
                    rows[run].copy_(piece)
            else:
                rows[self._index] = found[name]
        path.unlink()

    def _slices(self, rows: torch.Tensor) -> torch.Tensor:
        pieces = [rows[run] for run in self._runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _indexed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._index]


class _Buffers:
    """As many copies of everything as it takes to find each one cold; all hold touched pages."""

    def __init__(self, tokens: int, copies: int, consecutive: bool) -> None:
        slots = _slots(tokens, consecutive)
        self.ids = tuple(range(tokens))
        self.sources = cycle([_Side(slots) for _ in range(copies)])
        self.targets = cycle([_Side(slots) for _ in range(copies)])
        plain = [torch.rand(tokens * TOKEN_BYTES // 4).numpy().data.cast("B") for _ in range(2 * copies)]
        self.plain, self.copies = cycle(plain[:copies]), cycle(plain[copies:])


def _medians(bridge: ArenaBridge, path: Path | None, buffers: _Buffers, rounds: int) -> dict[str, float]:
    """Seconds of each way, with files if `path`; the first round warms up and does not count."""
    times: dict[str, list[float]] = defaultdict(list)
    handles = deque(new_handle() for _ in range(IMPORT_LAG))
    for handle in handles:
        _export(bridge, handle, buffers)
    for _ in range(rounds + 1):
        handles.append(new_handle())
        for way, call in _ways(bridge, path, buffers, handles[-1], handles.popleft()):
            start = time.thread_time()
            call()
            times[way].append(time.thread_time() - start)
    return {way: statistics.median(column[1:]) for way, column in times.items()}


def _ways(
    bridge: ArenaBridge, path: Path | None, buffers: _Buffers, new: str, old: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed in one round, in turn: `new` is exported, `old` imported."""
    plain, copy = next(buffers.plain), next(buffers.copies)
    yield "memcpy", lambda: _copy(copy, plain)
    yield "export", lambda: _export(bridge, new, buffers)
    yield "import", lambda: _import(bridge, old, buffers)
    if path is None:
        return
    for name, sliced in (("", False), (" sliced", True)):
        source, target = next(buffers.sources), next(buffers.targets)
        yield f"save{name}", partial(source.save, path, sliced=sliced)
        yield f"load{name}", partial(target.load, path, sliced=sliced)


def _export(bridge: ArenaBridge, handle: str, buffers: _Buffers) -> None:
    bridge.export(handle, buffers.ids, FirstToken(1, 0.0), False, next(buffers.sources).planes())


def _import(bridge: ArenaBridge, handle: str, buffers: _Buffers) -> None:
    record = bridge.own_lookup(handle)
    bridge.read_into(record, next(buffers.targets).planes(), len(record.token_ids))


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
