"""What the device path needs of CUDA, and a stand-in on the CPU that does its copies only when told to.

Gathers and scatters run on the caller's own (compute) stream.  Copies run on a stream of their own, so that
the compute stream never waits for an export and the host never waits for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream; torch.cuda.Event has these methods."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """One device with a compute stream, which is the current one, and a copy stream."""

    def empty(self, size_bytes: int) -> Tensor:
        """Device memory, uint8."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Host memory that the device copies to and from by itself, uint8."""

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """int64 on the device, without waiting for it."""

    def mark(self) -> Event:
        """Where the compute stream is now."""

    def copy(self, target: Tensor, source: Tensor, after: Event) -> Event:
        """On the copy stream, once `after` has passed; when it is done."""

    def follow(self, event: Event) -> None:
        """What is queued on the compute stream from here on comes after `event`; the host goes on."""


class CudaStreams:
    """The device of TGI's cache.  Makes no CUDA call before the first use.  Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: torch.cuda.Stream | None = None

    @property
    def _copying(self) -> torch.cuda.Stream:
        if self._made is None:
            self._made = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._made

    def empty(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, size_bytes: int) -> Tensor:
        """Or plain memory where no more can be pinned: copies are as right, and the host waits for them."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        on_host = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        return on_host.to(self._device, non_blocking=True)

    def mark(self) -> Event:
        return self._recorded(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor, after: Event) -> Event:
        stream = self._copying
        stream.wait_event(after)  # type: ignore[arg-type]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for side in (target, source):  # freed early, its memory is not given away before the copy is done
            if side.is_cuda:
                side.record_stream(stream)
        return self._recorded(stream)

    def follow(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        found: Event = event
        return found


@dataclass(slots=True)
class StepEvent:
    """Of StepStreams: `synchronize` is what makes the queue run."""

    streams: StepStreams
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.streams.run_until(self)


@dataclass(slots=True)
class StepStreams:
    """The fake: CPU tensors; compute happens at once, copies in order when `step` says so."""

    queued: list[tuple[Tensor, Tensor, StepEvent]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """Names of what was asked for, in order."""

    def empty(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pinned(self, size_bytes: int) -> Tensor:
        self.calls.append("pinned")
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def mark(self) -> Event:
        self.calls.append("mark")
        return StepEvent(self, done=True)

    def copy(self, target: Tensor, source: Tensor, after: Event) -> Event:
        assert after.query(), "compute happens at once here: what is marked has passed"
        event = StepEvent(self)
        self.queued.append((target, source, event))
        self.calls.append("copy")
        return event

    def follow(self, event: Event) -> None:
        """The compute stream cannot go on before the copy: here it is made to happen."""
        self.calls.append("follow")
        event.synchronize()

    def step(self) -> None:
        """Do the oldest copy that was queued."""
        target, source, event = self.queued.pop(0)
        with torch.inference_mode():  # a copy engine knows nothing of torch's modes
            target.copy_(source)
        event.done = True

    def run_until(self, event: StepEvent) -> None:
        while not event.done:
            self.step()
