"""Arena memory registered with a stand-in for CUDA's runtime: when, with which flags, and when not."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.unit.device.bed import FakeRuntime, Log
from tgi_patches.device.memory import address_of, tensor_over
from tgi_patches.device.registration import Registrar

PAGE = 4096


def allowed(runtime: FakeRuntime, log: Log | None = None) -> Registrar:
    registrar = Registrar(runtime, log or Log())
    registrar.allow()
    return registrar


def memory(pages: int = 2) -> memoryview:
    return memoryview(mmap.mmap(-1, pages * PAGE))


def read_only(tmp_path: Path) -> memoryview:
    path = tmp_path / "arena"
    path.write_bytes(bytes(range(256)) * 32)
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def test_an_own_arena_is_registered_once_to_read_and_write() -> None:
    runtime = FakeRuntime()
    registrar = allowed(runtime)
    arena = memory()
    assert registrar.add(arena)
    assert registrar.add(arena)
    assert runtime.calls == [("register", address_of(arena), 2 * PAGE, 0x01)]
    assert registrar.registered_bytes == 2 * PAGE
    assert registrar.counts == {"registered": 1}


def test_a_peers_arena_is_registered_for_reading_only(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    arena = read_only(tmp_path)
    assert allowed(runtime).add(arena)
    assert runtime.calls == [("register", address_of(arena), 2 * PAGE, 0x09)]


def test_where_the_device_registers_nothing_read_only_no_call_is_made_and_one_line_logged(
    tmp_path: Path,
) -> None:
    runtime, log = FakeRuntime(reads_only=False), Log()
    registrar = allowed(runtime, log)
    first, second = read_only(tmp_path), read_only(tmp_path)
    assert not registrar.add(first)
    assert not registrar.add(second)
    assert runtime.calls == []
    assert registrar.counts == {"read_only": 2}
    assert [line["reason"] for line in log.lines] == ["read_only"]


def test_no_call_is_made_before_warmup_returned_or_during_a_later_one() -> None:
    runtime, log = FakeRuntime(), Log()
    registrar = Registrar(runtime, log)
    arena = memory()
    assert not registrar.add(arena)
    registrar.allow()
    registrar.forbid()
    assert not registrar.add(arena)
    assert runtime.calls == []
    assert registrar.counts == {"too_early": 2}
    registrar.allow()
    assert registrar.add(arena)


def test_a_failure_is_counted_logged_once_and_leaves_no_error_for_others_to_find() -> None:
    runtime, log = FakeRuntime(failing=frozenset({"register"})), Log()
    registrar = allowed(runtime, log)
    arena = memory()
    assert not registrar.add(arena)
    assert not registrar.add(memory())
    assert [call[0] for call in runtime.calls] == ["register", "forget_error"] * 2
    assert registrar.counts == {"failed": 2}
    assert [line["detail"] for line in log.lines] == ["cudaHostRegister of 8192 bytes answered 801"]
    assert not registrar.covers(arena)
    registrar.close()
    assert len(runtime.calls) == 4


def test_only_what_lies_wholly_inside_is_covered() -> None:
    registrar = allowed(FakeRuntime())
    both = memory(4)
    registrar.add(both[PAGE : 3 * PAGE])
    assert registrar.covers(both[PAGE : 3 * PAGE])
    assert registrar.covers(both[2 * PAGE : 2 * PAGE + 8])
    assert not registrar.covers(both[PAGE - 1 : PAGE + 8])
    assert not registrar.covers(both[3 * PAGE - 8 : 3 * PAGE + 1])
    assert not registrar.covers(both[:8])
    assert not registrar.covers(both[3 * PAGE :])


def test_the_end_unregisters_everything_and_removal_one() -> None:
    runtime = FakeRuntime()
    registrar = allowed(runtime)
    first, second = memory(), memory()
    registrar.add(first)
    registrar.add(second)
    runtime.calls.clear()
    registrar.remove(first)
    registrar.remove(first)
    assert not registrar.covers(first)
    registrar.close()
    registrar.close()
    assert runtime.calls == [("unregister", address_of(first)), ("unregister", address_of(second))]


def test_a_removal_that_fails_is_counted() -> None:
    runtime = FakeRuntime(failing=frozenset({"unregister"}))
    registrar = allowed(runtime)
    registrar.add(memory())
    registrar.close()
    assert registrar.counts == {"registered": 1, "failed": 1}
    assert runtime.calls[-1] == ("forget_error",)


@pytest.mark.parametrize("writable", [True, False])
def test_a_tensor_over_mapped_memory_is_that_memory(tmp_path: Path, writable: bool) -> None:
    arena = memory() if writable else read_only(tmp_path)
    tensor = tensor_over(arena[256:512])
    if writable:
        arena[256:512] = bytes(range(256))
        tensor[0] = 7
        assert arena[256] == 7
        arena[256] = 0
    assert tensor.tolist() == list(range(256))
    assert tensor.data_ptr() == address_of(arena) + 256


def test_the_address_of_a_view_is_where_numpy_sees_it() -> None:
    arena = memory()
    assert address_of(arena[16:]) == np.asarray(arena).ctypes.data + 16
