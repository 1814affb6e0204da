"""Out of memory in a step: an error of the batch that was too large, not of the server."""

from __future__ import annotations

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""On the CPU torch raises a plain RuntimeError with this in it."""


class OutOfMemory(Exception):
    """In place of torch's own, which is a RuntimeError."""


def out_of_memory(error: BaseException) -> bool:
    """True for what torch raises when a device, or the host, has no room for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)
