"""NCCL's functions in order, over a stand-in for its library: nothing here has a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from tgi_patches.transport.link import Link, LinkError
from tgi_patches.transport.nccl import Config, Nccl, NcclCommunicator, NcclMeeting, UniqueId, non_blocking
from tgi_patches.transport.state import LinkLimits, Phase

IN_PROGRESS, REMOTE_ERROR = 7, 6
COMM = 0xC0FFEE


class FakeLibrary:
    """ncclXyz as attributes; `results` are what functions answer, 0 by default."""

    def __init__(self, version: int = 22703) -> None:
        self.calls: list[str] = []
        self.version = version
        self.state = 0
        """What ncclCommGetAsyncError reports."""
        self.results: dict[str, int] = {}
        self.config: Config | None = None
        self.moves: list[tuple[Any, ...]] = []
        self.inits: list[tuple[int, bytes, int]] = []

    def _answer(self, name: str) -> int:
        self.calls.append(name)
        return self.results.get(name, 0)

    def ncclGetVersion(self, found: Any) -> int:  # noqa: N802 - NCCL's name, as those below
        found._obj.value = self.version
        return 0

    def ncclGetErrorString(self, result: Any) -> bytes:  # noqa: N802
        return {6: b"remote process exited", 5: b"invalid usage"}[result.value]

    def ncclGetUniqueId(self, made: Any) -> int:  # noqa: N802
        ctypes.memmove(ctypes.byref(made._obj), bytes(range(128)), 128)
        return self._answer("ncclGetUniqueId")

    def ncclCommInitRankConfig(self, comm: Any, ranks: Any, id_: UniqueId, rank: Any, config: Any) -> int:  # noqa: N802
        comm._obj.value = COMM
        self.inits.append((ranks.value, ctypes.string_at(ctypes.byref(id_), 128), rank.value))
        self.config = config._obj
        return self._answer("ncclCommInitRankConfig")

    def ncclCommGetAsyncError(self, comm: Any, found: Any) -> int:  # noqa: N802
        assert comm.value == COMM
        found._obj.value = self.state
        return 0

    def ncclGroupStart(self) -> int:  # noqa: N802
        return self._answer("ncclGroupStart")

    def ncclGroupEnd(self) -> int:  # noqa: N802
        return self._answer("ncclGroupEnd")

    def ncclSend(self, *args: Any) -> int:  # noqa: N802
        self.moves.append(tuple(arg.value for arg in args))
        return self._answer("ncclSend")

    def ncclRecv(self, *args: Any) -> int:  # noqa: N802
        self.moves.append(tuple(arg.value for arg in args))
        return self._answer("ncclRecv")

    def ncclCommAbort(self, comm: Any) -> int:  # noqa: N802
        return self._answer("ncclCommAbort")

    def ncclCommFinalize(self, comm: Any) -> int:  # noqa: N802
        return self._answer("ncclCommFinalize")

    def ncclCommDestroy(self, comm: Any) -> int:  # noqa: N802
        return self._answer("ncclCommDestroy")


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("nobody waits")


class FakeLane:
    """Its calls go into the library's list, to see their order."""

    pointer = 0x57

    def __init__(self, library: FakeLibrary) -> None:
        self._calls = library.calls
        self.event = FakeEvent()

    def device(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def follow_compute(self) -> None:
        self._calls.append("follow_compute")

    def keep(self, tensor: Tensor) -> None:
        self._calls.append("keep")

    def mark(self) -> FakeEvent:
        self._calls.append("mark")
        return self.event


def made(library: FakeLibrary, rank: int = 0) -> tuple[NcclCommunicator, FakeLane]:
    lane = FakeLane(library)
    return NcclCommunicator(Nccl(library), lane, bytes(range(128)).hex(), rank), lane


def test_the_config_is_laid_out_as_nccls_header_has_it() -> None:
    """Offsets of ncclConfig_t on 64-bit Linux: 8 + 4 + 4, four ints, a pointer, an int, padding."""
    offsets = {name: getattr(Config, name).offset for name, _ in Config._fields_}
    assert offsets == {
        "size": 0,
        "magic": 8,
        "version": 12,
        "blocking": 16,
        "cga_cluster_size": 20,
        "min_ctas": 24,
        "max_ctas": 28,
        "net_name": 32,
        "split_share": 40,
    }
    assert ctypes.sizeof(Config) == 48
    assert ctypes.sizeof(UniqueId) == 128


def test_only_that_it_must_not_block_is_asked_for() -> None:
    config = non_blocking()
    assert (config.size, config.magic, config.version) == (48, 0xCAFEBEEF, 21800)
    assert (config.blocking, config.net_name) == (0, None)
    assert (config.cga_cluster_size, config.min_ctas, config.max_ctas, config.split_share) == (-(2**31),) * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ends_meet_under_one_id_and_are_looked_at_until_they_are_connected(rank: int) -> None:
    library = FakeLibrary()
    id_ = Nccl(library).new_id()
    assert id_ == bytes(range(128)).hex()
    library.results["ncclCommInitRankConfig"] = library.state = IN_PROGRESS
    communicator, _ = made(library, rank)
    communicator.start()
    assert library.inits == [(2, bytes(range(128)), rank)]
    assert library.config is not None
    assert library.config.blocking == 0
    assert not communicator.poll()
    library.state = 0
    assert communicator.poll()


@pytest.mark.parametrize(("rank", "function"), [(0, "ncclSend"), (1, "ncclRecv")])
def test_bytes_are_queued_in_a_group_after_the_compute_stream_and_an_event_after_them(
    rank: int, function: str
) -> None:
    library = FakeLibrary()
    communicator, lane = made(library, rank)
    communicator.start()
    library.calls.clear()
    tensor = torch.zeros(12, dtype=torch.uint8)
    library.results["ncclGroupEnd"] = library.state = IN_PROGRESS
    (communicator.send if rank == 0 else communicator.recv)(tensor)
    assert library.calls == ["follow_compute", "keep", "ncclGroupStart", function, "ncclGroupEnd"]
    assert library.moves == [(tensor.data_ptr(), 12, 1, 1 - rank, COMM, 0x57)]
    assert not communicator.done()
    assert "mark" not in library.calls  # NCCL has not queued all of it yet
    library.state = 0
    assert not communicator.done()
    assert not communicator.done()
    assert library.calls.count("mark") == 1
    lane.event.passed = True
    assert communicator.done()


def test_a_second_transfer_has_an_event_of_its_own() -> None:
    library = FakeLibrary()
    communicator, lane = made(library)
    communicator.start()
    communicator.send(torch.zeros(1, dtype=torch.uint8))
    lane.event.passed = True
    assert communicator.done()
    lane.event = FakeEvent()
    communicator.send(torch.zeros(1, dtype=torch.uint8))
    assert not communicator.done()


def test_errors_are_told_in_nccls_words_and_an_open_group_is_closed() -> None:
    library = FakeLibrary()
    communicator, _ = made(library)
    communicator.start()
    library.state = REMOTE_ERROR
    for look in (communicator.poll, communicator.done):
        with pytest.raises(LinkError, match="ncclCommGetAsyncError: remote process exited"):
            look()
    library.results["ncclSend"] = 5
    library.calls.clear()
    with pytest.raises(LinkError, match="ncclSend: invalid usage"):
        communicator.send(torch.zeros(1, dtype=torch.uint8))
    assert library.calls[-1] == "ncclGroupEnd"


def test_a_deadline_aborts_the_communicator_once() -> None:
    library = FakeLibrary()
    library.state = IN_PROGRESS
    communicator, _ = made(library)
    lost: list[str] = []
    link = Link(LinkLimits(connect_s=5.0), moved=lambda: None, lost=lost.append)
    link.connect(communicator, 0.0)
    link.poll(4.0)
    assert "ncclCommAbort" not in library.calls
    link.poll(5.0)
    link.poll(6.0)
    assert library.calls == ["ncclCommInitRankConfig", "ncclCommAbort"]
    assert lost == ["connecting took too long"]
    communicator.abort()
    assert library.calls.count("ncclCommAbort") == 1


def test_an_abort_that_fails_is_no_error_of_anybody_else() -> None:
    library = FakeLibrary()
    library.results["ncclCommAbort"] = REMOTE_ERROR
    communicator, _ = made(library)
    communicator.start()
    communicator.abort()
    with pytest.raises(LinkError, match="not there"):
        communicator.poll()


def test_an_orderly_end_flushes_before_it_destroys() -> None:
    library = FakeLibrary()
    communicator, _ = made(library)
    assert communicator.close()
    communicator.start()
    library.calls.clear()
    library.state = IN_PROGRESS
    assert not communicator.close()
    assert not communicator.close()
    library.state = 0
    assert communicator.close()
    assert communicator.close()
    assert library.calls == ["ncclCommFinalize", "ncclCommDestroy"]


def test_a_library_that_is_too_old_is_refused_in_a_sentence() -> None:
    with pytest.raises(LinkError, match=r"NCCL is of version 21703; 21800 or newer is needed\."):
        Nccl(FakeLibrary(version=21703))


def test_a_whole_link_over_nccl_moves_a_record() -> None:
    library = FakeLibrary()
    communicator, lane = made(library)
    moved: list[bool] = []
    link = Link(LinkLimits(), moved=lambda: moved.append(True), lost=lambda reason: None)
    link.connect(communicator, 0.0)
    link.poll(0.0)
    link.offer(0.0)
    link.send(torch.zeros(3, dtype=torch.uint8), 0.0)
    link.poll(0.1)
    assert (link.phase, moved) == (Phase.MOVING, [])
    lane.event.passed = True
    link.poll(0.2)
    assert (link.phase, moved) == (Phase.READY, [True])


@pytest.mark.parametrize("where", ["", "zz", "00" * 127, "0" * 257])
def test_what_is_no_id_is_no_place_to_meet(where: str) -> None:
    with pytest.raises(LinkError, match="no NCCL id"):
        NcclMeeting(torch.device("cpu")).communicator(where, 0)
