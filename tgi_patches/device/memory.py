"""Mapped memory as an address and as a tensor, writable or not."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    found: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return found


def tensor_over(memory: memoryview) -> Tensor:
    """Its bytes as uint8, without a copy; to be dropped before the memory is unmapped.

    torch warns of read-only buffers, so one is handed over as an address; such a tensor is a source only.
    """
    if not memory.readonly:
        return torch.frombuffer(memory, dtype=torch.uint8)
    bare = (ctypes.c_uint8 * memory.nbytes).from_address(address_of(memory))
    return torch.frombuffer(bare, dtype=torch.uint8)
