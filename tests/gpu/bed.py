"""What every part stands on: a device or its stand-in, and an arena with a writer and a reader."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tgi_patches.bridge import FirstToken, Reservation
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import BridgeMiss, Fingerprint
from tgi_patches.device.pool import DevicePool
from tgi_patches.device.registration import Registrar, TorchRuntime
from tgi_patches.device.streams import CudaStreams, StepStreams, Streams

FINGERPRINT = Fingerprint("gpu-test", "r", "t", "float16", "float16", layers=1, kv_heads=1, head_dim=64)
DRY_RING_BYTES = 8 << 20
RING_BYTES = 2 << 30
TTL_S = 600.0


class NoDeviceError(Exception):
    """This part needs a GPU."""


@dataclass(slots=True)
class Bed:
    """`device` is `cpu` in a dry run."""

    device: torch.device
    streams: Streams
    writer: ArenaBridge
    reader: ArenaBridge
    folder: Path
    registrar: Registrar | None = None
    log: list[str] = field(default_factory=list)
    records: int = 0

    @classmethod
    @contextmanager
    def open(cls, folder: str, *, dry: bool) -> Iterator[Self]:
        on_gpu = torch.cuda.is_available() and not dry
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        ring_bytes = min(RING_BYTES if on_gpu else DRY_RING_BYTES, _room(folder))
        root = Path(folder) / "arenas"
        writer = ArenaBridge(root, "gpu", "p", 0, 1, FINGERPRINT, ring_bytes, TTL_S)
        reader = ArenaBridge(root, "gpu", "d", 0, 1, FINGERPRINT, 0, TTL_S)
        streams: Streams = CudaStreams(device) if on_gpu else StepStreams()
        bed = cls(device, streams, writer, reader, Path(folder))
        if on_gpu:
            bed.registrar = Registrar(TorchRuntime(device), bed._warn)
            bed.registrar.allow()
        try:
            yield bed
        finally:
            if bed.registrar is not None:
                torch.cuda.synchronize()
                bed.registrar.close()
            writer.close()
            reader.close()

    def _warn(self, event: str, /, **facts: str) -> None:
        self.log.append(f"{event} {facts}")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def needs_gpu(self) -> None:
        if not self.on_gpu:
            raise NoDeviceError("no CUDA device")

    @property
    def ring(self) -> memoryview:
        """The writer's own ring."""
        assert self.writer._writer is not None
        return self.writer._writer.mapping.data

    def register(self) -> bool:
        return self.registrar is not None and self.registrar.add(self.ring)

    def fitting(self, token_bytes: int, wanted_tokens: int) -> int:
        """So many tokens that a record of them fits into the ring's limit, its description too."""
        return min(wanted_tokens, self.writer.record_limit_bytes * 9 // 10 // token_bytes)

    def pool(self, cache: Sequence[tuple[Tensor, Tensor]]) -> DevicePool:
        registrar = self.registrar
        direct: Callable[[memoryview], bool] = registrar.covers if registrar else lambda memory: True
        return DevicePool(cache, self.streams, direct=direct)

    def next_handle(self) -> str:
        self.records += 1
        return f"{self.records:032x}"

    def reserve(self, handle: str, tokens: int) -> Callable[[Sequence[int]], Reservation]:
        first = FirstToken(1, -1.0)
        return lambda sizes: self.writer.reserve(handle, range(tokens), first, False, sizes, checked=False)

    def raised(self, miss: BridgeMiss | None) -> None:
        """As `done` of an export that must succeed."""
        if miss is not None:
            raise miss


def _room(folder: str) -> int:
    """Most of what is free there, in whole MiB: a container's /dev/shm may be small."""
    return shutil.disk_usage(folder).free * 8 // 10 >> 20 << 20


def timed_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Median of CUDA event times on the current stream."""
    times = []
    for _ in range(repeats + 1):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return sorted(times[1:])[repeats // 2]


def noise(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Random bytes as `dtype`, NaNs of every kind among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator(device).manual_seed(seed)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)
    return raw.view(dtype).view(shape)


def scattered(tokens: int, of: int, seed: int = 1) -> list[int]:
    """Slots as a busy cache hands them out: stretches here and there."""
    chance, free = random.Random(seed), list(range(0, of, 16))
    slots: list[int] = []
    chance.shuffle(free)
    for start in free[: -(-tokens // 16)]:
        slots.extend(range(start, start + 16))
    return slots[:tokens]
