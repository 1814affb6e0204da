"""A step that fails: what TGI is told in its place, and when the server asks to be replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.overlay_stand_ins.flash import FlashShard
from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tests.unit.overlay_stand_ins.messages import ask, put_tag
from tgi_patches.hooks.install import _Laid
from tgi_patches.hooks.memory import OutOfMemory, out_of_memory
from tgi_patches.hooks.overlay import HEALTH_REQUEST_ID, Place

GLOBALS = "text_generation_server.models.globals"
DEVICE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: ...")
Caching = Callable[[bool], None]


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> Caching:
    """Sets TGI's own switch."""
    return lambda on: monkeypatch.setitem(sys.modules, GLOBALS, SimpleNamespace(PREFIX_CACHING=on))


class Server:
    """A shard, and its service's two calls, which fail with an error."""

    def __init__(self, host: Host, ranks: int = 1) -> None:
        self.shard = FlashShard(host, "d")
        self.laid = _Laid(Place(self.shard.overlay.spec, 1, 0, ranks), [])
        self.laid._overlay = self.shard.overlay

    async def raised(self, call: str, error: Exception, request_id: int = 1) -> BaseException:
        async def fails(*_: Any) -> None:
            raise error

        request = SimpleNamespace(batch=SimpleNamespace(requests=[SimpleNamespace(id=request_id)]))
        with pytest.raises(Exception) as told:
            await getattr(self.laid, call)(fails, None, request, None)
        return told.value


@pytest.mark.parametrize("call", ["prefilled", "decoded"])
@pytest.mark.parametrize("error", [DEVICE, HOST], ids=["device", "host"])
async def test_out_of_memory_is_no_runtime_error_any_more(
    host: Host, caching: Caching, call: str, error: Exception
) -> None:
    """TGI's interceptor ends the server at every RuntimeError."""
    caching(False)
    server = Server(host)
    told = await server.raised(call, error)
    assert isinstance(told, OutOfMemory)
    assert not isinstance(told, RuntimeError)
    assert told.__cause__ is error
    assert server.shard.report.relaunch == ""


@pytest.mark.parametrize("call", ["prefilled", "decoded"])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: illegal access"), ValueError("a prompt")])
async def test_other_errors_are_tgi_s_own(host: Host, caching: Caching, call: str, error: Exception) -> None:
    caching(False)
    assert await Server(host).raised(call, error) is error


async def test_ranks_that_fail_alone_end_their_server(host: Host, caching: Caching) -> None:
    caching(False)
    assert await Server(host, ranks=2).raised("prefilled", DEVICE) is DEVICE


@pytest.mark.parametrize("call", ["prefilled", "decoded"])
@pytest.mark.parametrize("error", [DEVICE, ValueError("a prompt")], ids=["memory", "other"])
async def test_with_prefix_caching_a_failed_step_ends_the_server_or_asks_for_another(
    host: Host, caching: Caching, call: str, error: Exception
) -> None:
    """Prompts of which a chunk is missing are in the router's trie: also those of a decode."""
    caching(True)
    server = Server(host)
    assert await server.raised(call, error) is error
    assert "prefix caching" in server.shard.report.relaunch
    server.shard.prefill(ask(put_tag(1), max_new_tokens=1))
    assert server.shard.report.exports == {"error": 1}, "what it exported now could not be trusted"


async def test_a_health_probe_that_fails_poisons_nothing(host: Host, caching: Caching) -> None:
    caching(True)
    server = Server(host)
    await server.raised("prefilled", ValueError("a prompt"), HEALTH_REQUEST_ID)
    assert server.shard.report.relaunch == ""


def test_only_memory_is_memory() -> None:
    assert out_of_memory(DEVICE)
    assert out_of_memory(HOST)
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
