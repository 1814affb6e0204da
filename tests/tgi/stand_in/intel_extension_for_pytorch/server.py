"""Three things that a test of TGI's server needs and its command line cannot say.

TGI sizes its KV cache from all free memory, which would starve the other servers of a test; and
where it finds IPEX its default dtype is bfloat16, while only float32 promises equal tokens in mixed batches.
And a test decides when a forward fails, by a file that says how.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

FREE_MIB_VARIABLE = "IPEX_STAND_IN_FREE_MIB"
"""Memory that TGI may take for its KV cache, beside what its warmup batch needs."""
DTYPE_VARIABLE = "IPEX_STAND_IN_DTYPE"
"""The dtype of a model for which the command line names none, such as `float32`."""
FAIL_VARIABLE = "IPEX_STAND_IN_FAIL"
"""A file; while it exists, every forward raises what it names: a key of FAILURES."""
FREE_MIB = 256
FAILURES: Mapping[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: error code 12"),
    "input": lambda: ValueError("a prompt that cannot be computed"),
    "other": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
}
FLASH_MODULE = "text_generation_server.models.flash_causal_lm"


def adapt() -> None:
    """Take effect in this process, before TGI reads its free memory or loads a model."""
    cap_free_memory(int(os.environ.get(FREE_MIB_VARIABLE, FREE_MIB)) << 20)
    if dtype := os.environ.get(DTYPE_VARIABLE):
        sys.meta_path.insert(0, _AfterImport(FLASH_MODULE, _with_default_dtype(getattr(torch, dtype))))
    if named := os.environ.get(FAIL_VARIABLE):
        sys.meta_path.insert(0, _AfterImport(FLASH_MODULE, _failing(Path(named))))


def cap_free_memory(limit_bytes: int) -> None:
    """psutil never reports more than `limit_bytes` as available."""
    read = psutil.virtual_memory

    @functools.wraps(read)
    def capped() -> Any:
        memory = read()
        return memory._replace(available=min(memory.available, limit_bytes))

    psutil.virtual_memory = capped


def _with_default_dtype(dtype: torch.dtype) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        build = module.FlashCausalLM.__init__

        @functools.wraps(build)
        def with_dtype(self: Any, *args: Any, **named: Any) -> None:
            if named.get("dtype") is None:
                named["dtype"] = dtype
            build(self, *args, **named)

        module.FlashCausalLM.__init__ = with_dtype

    return change


def _failing(told: Path) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        forward = module.FlashCausalLM.forward

        @functools.wraps(forward)
        def perhaps(*args: Any, **named: Any) -> Any:
            if told.exists():
                raise FAILURES[told.read_text()]()
            return forward(*args, **named)

        module.FlashCausalLM.forward = perhaps

    return change


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `change` once, right after the module `name` was executed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run, change = spec.loader.exec_module, self._change

            def run_and_change(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec
