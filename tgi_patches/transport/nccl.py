"""A Communicator of GPU tensors over NCCL's C library, by ctypes.  Not yet run on a GPU.

A communicator of its own with a stream of its own, made without blocking (`blocking=0`) and looked at with
ncclCommGetAsyncError; given up with ncclCommAbort.  TGI's communicators, and torch's, are never touched.
Structs and numbers are those of NCCL's public header, nccl.h, as of 2.18.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tgi_patches.device.streams import Event
from tgi_patches.transport.link import LinkError

VERSION_MIN = 21800
"""2.18.0 as NCCL counts: earlier ones know no non-blocking splits and lack fields of the config."""
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
ID_BYTES = 128
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as far as 2.18 has it; `size` and `version` tell a newer library so."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


def non_blocking() -> Config:
    """A config in which only `blocking` is said."""
    return Config(
        size=ctypes.sizeof(Config),
        magic=_MAGIC,
        version=VERSION_MIN,
        blocking=0,
        cga_cluster_size=_UNDEFINED,
        min_ctas=_UNDEFINED,
        max_ctas=_UNDEFINED,
        net_name=None,
        split_share=_UNDEFINED,
    )


class Lane(Protocol):
    """A stream of one device, beside the compute stream."""

    @property
    def pointer(self) -> int:
        """cudaStream_t."""

    def device(self) -> AbstractContextManager[object]:
        """NCCL takes the thread's current device."""

    def follow_compute(self) -> None:
        """What comes next waits for what the compute stream was told so far."""

    def keep(self, tensor: Tensor) -> None:
        """Its memory is not given away before this stream is done with it."""

    def mark(self) -> Event:
        """Where this stream is now."""


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pointer(self) -> int:
        return int(self._stream.cuda_stream)

    def device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def follow_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def mark(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        found: Event = event
        return found


class Nccl:
    """The library's functions; results other than success and in-progress are LinkErrors in words."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.version = self._version()
        if self.version < VERSION_MIN:
            raise LinkError(f"NCCL is of version {self.version}; {VERSION_MIN} or newer is needed.")

    @classmethod
    def load(cls) -> Nccl:
        """The one that torch brings along, which is loaded already.  Raises LinkError."""
        try:
            library = ctypes.CDLL(_shipped())
            library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise LinkError(f"NCCL cannot be loaded: {error}") from None
        return cls(library)

    def new_id(self) -> str:
        """For both ends of one communicator; hex."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.byref(made), ID_BYTES).hex()

    def init(self, rank: int, id_: str, ranks: int = 2) -> ctypes.c_void_p:
        comm = ctypes.c_void_p()
        unique = UniqueId.from_buffer_copy(bytes.fromhex(id_))
        config = non_blocking()
        self.call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            ctypes.c_int(ranks),
            unique,
            ctypes.c_int(rank),
            ctypes.byref(config),
        )
        return comm

    def settled(self, comm: ctypes.c_void_p) -> bool:
        """Nothing that was asked of the host is still under way.  Raises LinkError for an error since."""
        found = ctypes.c_int(IN_PROGRESS)
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(found))
        self._check("ncclCommGetAsyncError", found.value)
        return found.value == SUCCESS

    def move(self, function: str, comm: ctypes.c_void_p, tensor: Tensor, peer: int, stream: int) -> None:
        """`ncclSend` or `ncclRecv` in a group of its own: only a group's end may be left in progress."""
        self.call("ncclGroupStart")
        try:
            self.call(
                function,
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_size_t(tensor.numel()),
                ctypes.c_int(UINT8),
                ctypes.c_int(peer),
                comm,
                ctypes.c_void_p(stream),
            )
        finally:
            self.call("ncclGroupEnd")

    def call(self, function: str, *args: Any) -> None:
        self._check(function, int(getattr(self._library, function)(*args)))

    def _check(self, function: str, result: int) -> None:
        if result in (SUCCESS, IN_PROGRESS):
            return
        text = self._library.ncclGetErrorString(ctypes.c_int(result))
        raise LinkError(f"{function}: {text.decode() if text else result}")

    def _version(self) -> int:
        found = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        return found.value


class NcclCommunicator:
    """`id_` from `Nccl.new_id`, the same at both ends; `rank` 0 or 1."""

    def __init__(self, nccl: Nccl, lane: Lane, id_: str, rank: int) -> None:
        self._nccl = nccl
        self._lane = lane
        self._id = id_
        self._rank = rank
        self._comm: ctypes.c_void_p | None = None
        self._event: Event | None = None
        """Of the transfer under way, once NCCL has queued all of it."""
        self._closing = False

    def start(self) -> None:
        with self._lane.device():
            self._comm = self._nccl.init(self._rank, self._id)

    def poll(self) -> bool:
        return self._nccl.settled(self._known())

    def send(self, tensor: Tensor) -> None:
        self._move("ncclSend", tensor)

    def recv(self, tensor: Tensor) -> None:
        self._move("ncclRecv", tensor)

    def done(self) -> bool:
        """Queued by NCCL's host side first; only then does an event on the stream come after it."""
        if not self._nccl.settled(self._known()):
            return False
        if self._event is None:
            self._event = self._lane.mark()
        return self._event.query()

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            with suppress(LinkError):  # there is nothing left to do about it
                self._nccl.call("ncclCommAbort", comm)

    def close(self) -> bool:
        """In good order, when nothing is under way; call it until it is True.  Raises LinkError."""
        if self._comm is None:
            return True
        if not self._closing:
            self._closing = True
            self._nccl.call("ncclCommFinalize", self._comm)
        if not self._nccl.settled(self._comm):
            return False
        comm, self._comm = self._comm, None
        self._nccl.call("ncclCommDestroy", comm)
        return True

    def _move(self, function: str, tensor: Tensor) -> None:
        comm = self._known()
        self._event = None
        self._lane.follow_compute()
        self._lane.keep(tensor)
        with self._lane.device():
            self._nccl.move(function, comm, tensor, 1 - self._rank, self._lane.pointer)

    def _known(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise LinkError("the communicator is not there")
        return self._comm


class NcclMeeting:
    """A Meeting of processes whose GPUs NCCL can connect.  Loads the library when it is first asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nccl: Nccl | None = None

    def invite(self) -> str:
        return self._loaded().new_id()

    def communicator(self, where: str, rank: int) -> NcclCommunicator:
        if not re.fullmatch(f"[0-9a-f]{{{2 * ID_BYTES}}}", where):
            raise LinkError("that is no NCCL id")
        return NcclCommunicator(self._loaded(), CudaLane(self._device), where, rank)

    def _loaded(self) -> Nccl:
        if self._nccl is None:
            self._nccl = Nccl.load()
        return self._nccl


def _shipped() -> str:
    """The path of torch's NCCL; its bare name where torch was built with it."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = Path(folder) / "lib" / "libnccl.so.2"
        if found.exists():
            return str(found)
    return "libnccl.so.2"
