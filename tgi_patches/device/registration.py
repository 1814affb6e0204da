"""Arena memory that the device's copy engine reads and writes by itself: registered with CUDA once.

Whatever cannot be registered is used all the same, through a pinned buffer; it is counted and logged once.
Never before Warmup returned: TGI captures CUDA graphs there, and a CUDA call of ours would end the capture.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tgi_patches.device.memory import address_of

READ_WRITE = 0x00
PORTABLE = 0x01
"""Seen as pinned by every context of the process."""
READ_ONLY = 0x08
"""For mappings that this process may not write."""
_ATTRIBUTE_READ_ONLY = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED of the driver's API."""


class Runtime(Protocol):
    """The few CUDA calls; results are CUDA's error numbers, 0 for success."""

    def register(self, address: int, size_bytes: int, flags: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def reads_only(self) -> bool:
        """The device can register memory that it only reads."""

    def forget_error(self) -> None:
        """A call that failed must not be noticed by the next kernel that somebody else launches."""


class TorchRuntime:
    """Through torch's own binding of the CUDA runtime.  Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostRegister(address, size_bytes, flags))

    def unregister(self, address: int) -> int:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostUnregister(address))

    def reads_only(self) -> bool:
        value = ctypes.c_int(0)
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            failed = driver.cuDeviceGetAttribute(
                ctypes.byref(value), _ATTRIBUTE_READ_ONLY, self._device.index or 0
            )
        except (OSError, AttributeError):
            return False
        return not failed and bool(value.value)

    def forget_error(self) -> None:
        """torch asks for the last error after it launched a kernel, which clears it, and raises it."""
        try:
            torch.empty(1, device=self._device).add_(1)
        except RuntimeError:
            return


class Registrar:
    """Which stretches of memory are registered.  `allow` after each Warmup, `forbid` before it."""

    def __init__(self, runtime: Runtime, warn: Callable[..., object]) -> None:
        self._runtime = runtime
        self._warn = warn
        self._allowed = False
        self._known: dict[int, int] = {}
        """Size by address."""
        self._warned: set[str] = set()
        self.counts: Counter[str] = Counter()
        """`registered`, or why not: `too_early`, `read_only`, `failed`."""

    @property
    def registered_bytes(self) -> int:
        return sum(self._known.values())

    def allow(self) -> None:
        self._allowed = True

    def forbid(self) -> None:
        self._allowed = False

    def add(self, memory: memoryview) -> bool:
        """True where copies may go straight to and from `memory`, which stays mapped until `remove`."""
        address, size_bytes = address_of(memory), memory.nbytes
        if self._known.get(address) == size_bytes:
            return True
        if not self._allowed:
            return self._not("too_early", "Warmup has not returned")
        flags = PORTABLE | (READ_ONLY if memory.readonly else READ_WRITE)
        if memory.readonly and not self._runtime.reads_only():
            return self._not("read_only", "this device registers no memory that it may only read")
        error = self._runtime.register(address, size_bytes, flags)
        if error:
            self._runtime.forget_error()
            return self._not("failed", f"cudaHostRegister of {size_bytes} bytes answered {error}")
        self._known[address] = size_bytes
        self.counts["registered"] += 1
        return True

    def covers(self, memory: memoryview) -> bool:
        """All of `memory` lies in a registered stretch."""
        address = address_of(memory)
        starts = sorted(self._known)
        at = bisect_right(starts, address) - 1
        return at >= 0 and address + memory.nbytes <= starts[at] + self._known[starts[at]]

    def remove(self, memory: memoryview) -> None:
        """Before it is unmapped, and after every copy to or from it has ended."""
        self._drop(address_of(memory))

    def close(self) -> None:
        for address in list(self._known):
            self._drop(address)

    def _drop(self, address: int) -> None:
        if self._known.pop(address, None) is None:
            return
        error = self._runtime.unregister(address)
        if error:
            self._runtime.forget_error()
            self._not("failed", f"cudaHostUnregister answered {error}")

    def _not(self, reason: str, detail: str) -> bool:
        self.counts[reason] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn("arena_not_registered", reason=reason, detail=detail)
        return False
