"""What is asked of CUDA and in which order, with torch.cuda's classes replaced: nothing here has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tgi_patches.device.registration import TorchRuntime
from tgi_patches.device.streams import CudaStreams
from tgi_patches.transport.nccl import CudaLane


class FakeCuda:
    """torch.cuda's streams and events; `calls` is what happened, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.current = "compute"
        self.made = 0

    def stream_class(self, device: Any) -> FakeStream:
        self.made += 1
        return FakeStream(self, f"copy{self.made}")

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self, self.current)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event_class(self) -> FakeEvent:
        return FakeEvent(self)


class FakeStream:
    cuda_stream = 77

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append((self.name, f"wait for {event.at}"))

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append((self.name, f"wait for all of {other.name}"))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at = ""

    def record(self, stream: FakeStream) -> None:
        self.at = stream.name
        self.cuda.calls.append((stream.name, "record"))


class FakeTensor:
    """On the device; says on which stream it was copied."""

    is_cuda = True

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self.cuda.calls.append((self.cuda.current, f"copy {source.name} to {self.name}"))

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.calls.append((stream.name, f"keep {self.name}"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream_class)
    monkeypatch.setattr(torch.cuda, "Event", fake.event_class)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    return fake


def test_a_copy_waits_on_its_own_stream_and_keeps_both_sides(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    assert cuda.made == 0  # nothing is asked of CUDA before the first copy
    target: Any = FakeTensor(cuda, "staging")
    source: Any = FakeTensor(cuda, "cache")
    done: Any = streams.copy(target, source, streams.mark())
    assert cuda.calls == [
        ("compute", "record"),
        ("copy1", "wait for compute"),
        ("copy1", "copy cache to staging"),
        ("copy1", "keep staging"),
        ("copy1", "keep cache"),
        ("copy1", "record"),
    ]
    assert done.at == "copy1"
    assert cuda.current == "compute"


def test_all_copies_share_one_stream_and_the_compute_stream_follows_only_when_told(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    memory: Any = FakeTensor(cuda, "x")
    first = streams.copy(memory, memory, streams.mark())
    streams.copy(memory, memory, streams.mark())
    assert cuda.made == 1
    assert not any(name == "compute" and what.startswith("wait") for name, what in cuda.calls)
    streams.follow(first)
    assert cuda.calls[-1] == ("compute", "wait for copy1")


def test_a_lane_for_nccl_is_a_stream_of_its_own_behind_the_compute_stream(cuda: FakeCuda) -> None:
    lane = CudaLane(torch.device("cuda", 0))
    lane.follow_compute()
    tensor: Any = FakeTensor(cuda, "payload")
    lane.keep(tensor)
    event: Any = lane.mark()
    assert lane.pointer == 77
    assert cuda.calls == [
        ("copy1", "wait for all of compute"),
        ("copy1", "keep payload"),
        ("copy1", "record"),
    ]
    assert event.at == "copy1"


def test_where_nothing_can_be_pinned_plain_memory_serves() -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    buffer = CudaStreams(torch.device("cuda", 0)).pinned(10)
    assert (buffer.numel(), buffer.is_pinned()) == (10, False)


class FakeCudart:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *args: int) -> int:  # noqa: N802 - CUDA's name, as below
        self.calls.append(("register", *args))
        return 801

    def cudaHostUnregister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(("unregister", *args))
        return 0


def test_registration_goes_through_torchs_binding_and_answers_cudas_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    runtime = TorchRuntime(torch.device("cuda", 0))
    assert runtime.register(4096, 8192, 9) == 801
    assert runtime.unregister(4096) == 0
    assert cudart.calls == [("register", 4096, 8192, 9), ("unregister", 4096)]


def test_a_machine_without_a_driver_registers_nothing_read_only() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    assert not TorchRuntime(torch.device("cuda", 0)).reads_only()
