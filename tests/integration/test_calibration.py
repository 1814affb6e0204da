"""Calibration of a real embedded shard over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from orchestrator.calibration import calibrate
from orchestrator.core.ticket import ShardView
from orchestrator.embedded.shard.assemble import assemble
from orchestrator.embedded.shard.server import create_app
from orchestrator.shards.client import ShardClient
from tgi_patches.contract import Role, ShardSpec

PATIENCE_S = 30.0


@asynccontextmanager
async def shard_of(model: Path, folder: Path, role: Role) -> AsyncIterator[tuple[ShardView, ShardClient]]:
    """A shard on a port, with a prefix cache to be fooled by, as the shard table shows it."""
    made = assemble(
        ShardSpec(
            deployment="test",
            shard=f"{role}-0",
            role=role,
            model=str(model),
            model_name="tiny",
            arena_dir=str(folder),
            arena_bytes=8 << 20 if role is Role.PREFILL else 0,
            max_input_tokens=500,
            max_total_tokens=600,
            prefix_caching=role is Role.PREFILL,
            cpus=(min(os.sched_getaffinity(0)),),
        )
    )
    await made.server.warmup()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(create_app(made.server), log_config=None, access_log=False))
    async with AsyncExitStack() as stack:
        stack.callback(made.close)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(server.serve(sockets=[listener]))
        stack.callback(setattr, server, "should_exit", True)
        client = ShardClient()
        stack.push_async_callback(client.aclose)
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            status = await client.status(url)
        yield (
            ShardView(
                shard=status.shard,
                role=status.role,
                epoch=status.epoch,
                url=url,
                state="ready",
                fingerprint=status.fingerprint,
                limits=status.limits,
                kv_tokens=status.kv_tokens,
                slots=status.slots,
                ring_bytes=status.ring_bytes,
                record_limit_bytes=status.record_limit_bytes,
                bytes_per_token=status.bytes_per_token,
            ),
            client,
        )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_embedded_shard_is_calibrated_and_free_again(
    tiny_model: Path, tmp_path: Path, role: Role
) -> None:
    async with shard_of(tiny_model, tmp_path / "arenas", role) as (view, client):
        costs = await calibrate(view, client)
        assert costs is not None
        assert costs.prefill is not None
        assert costs.decode is not None
        assert 0 < costs.prefill.alone_s(100) < 10
        assert 0 < costs.decode.step_s(1, 100) < 10
        assert 64 <= costs.prefill.saturation_tokens(4096) <= 4096
        status = await client.status(view.url)
        assert (status.running, status.waiting, status.kv_tokens_used) == (0, 0, 0)


async def test_a_shard_that_is_gone_is_not_calibrated(tiny_model: Path, tmp_path: Path) -> None:
    async with shard_of(tiny_model, tmp_path / "arenas", Role.DECODE) as (view, _):
        pass
    other = ShardClient()
    assert await calibrate(view, other, budget_s=5.0) is None
    await other.aclose()
