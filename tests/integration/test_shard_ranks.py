"""Ranks as processes: they serve together, and none outlives the others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.embedded.shard.ranks.channel import Channel
from orchestrator.embedded.shard.ranks.followers import Follower
from orchestrator.embedded.shard.ranks.followers import launched as launched_rank
from orchestrator.shards.process import ProcessLauncher
from tests.unit.rank_stand_ins.threads import serving, spec
from tgi_patches.contract import GetTag, PutTag, Role, StatusReply, new_handle

PROMPT = "the ship left the harbour before the sun rose and"
LONG_S = 60.0
LONELY = """
import asyncio, socket
from orchestrator.embedded.shard.ranks.followers import launched

async def main():
    ours, theirs = socket.socketpair()
    process = await launched(theirs)
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[ProcessLauncher]:
    made = ProcessLauncher(tmp_path / "logs")
    yield made
    await made.close(grace_s=2.0)


async def launched(
    launcher: ProcessLauncher, model: Path, arenas: Path
) -> tuple[httpx.AsyncClient, int, psutil.Process]:
    """A client of a prefill shard of two ranks that is ready, its pid, and its follower."""
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    running = await launcher.launch(spec(model, arenas, Role.PREFILL, 2, cpus=cores))
    client = httpx.AsyncClient(base_url=running.url, timeout=LONG_S)
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                assert (await client.get("/health")).status_code == 200
                break
            except httpx.TransportError:
                assert running.shard in await launcher.running(), await launcher.logs(running.shard, 20)
                await asyncio.sleep(0.05)
    (follower,) = psutil.Process(running.pid).children()
    return client, running.pid, follower


@pytest.mark.slow
async def test_a_shard_of_two_processes_relays_to_one_and_ends_with_its_follower(
    launcher: ProcessLauncher, tiny_model: Path, tmp_path: Path
) -> None:
    prefill, pid, follower = await launched(launcher, tiny_model, tmp_path)
    cores = [psutil.Process(number).cpu_affinity() for number in (pid, follower.pid)]
    assert [len(of_rank or ()) for of_rank in cores] == [1, 1]
    handle = new_handle()
    parameters = {"max_new_tokens": 1, "adapter_id": str(PutTag(handle))}
    await prefill.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
    reply = (await prefill.get(f"/kv/wait/{handle}?timeout_s=5")).json()
    status = StatusReply.from_dict((await prefill.get("/kv/status")).json())
    tag = GetTag(handle, status.shard, status.epoch, reply["first_token_id"])
    async with serving(spec(tiny_model, tmp_path, Role.DECODE, 1)) as decode:
        wanted, _ = await decode.ask(PROMPT, 8)
        assert await decode.ask(PROMPT, 8, tag) == (wanted, "hit")

    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 200, "ignore_eos_token": True}}
    async with prefill.stream("POST", "/generate_stream", json=asked) as stream:
        lines = stream.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data:"))["token"]["id"] == wanted[0]
        follower.kill()
        rest = [line async for line in lines]
    assert "Rank 1 of this shard ended (signal 9)." in json.loads(rest[-2].removeprefix("data:"))["error"]
    async with asyncio.timeout(LONG_S):
        ended = await launcher.wait("prefill-2")
    assert (ended.code, ended.last_line) == (1, "Rank 1 of this shard ended (signal 9).")
    await prefill.aclose()


def test_a_follower_ignores_what_tells_the_shard_to_stop_and_does_not_outlive_it() -> None:
    with subprocess.Popen([sys.executable, "-c", LONELY], stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        follower = psutil.Process(int(rank_0.stdout.readline()))
        while signal.SIGTERM not in _ignored(follower.pid):
            assert follower.is_running()
        follower.send_signal(signal.SIGTERM)
        follower.send_signal(signal.SIGINT)
        assert follower.is_running()
        rank_0.kill()
        follower.wait(10)


async def test_a_follower_that_does_not_react_is_killed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await launched_rank(theirs)
    follower = Follower(1, process, await Channel.over(ours))
    process.send_signal(signal.SIGSTOP)
    await follower.stop()
    assert follower.exit.result() == -signal.SIGKILL
    assert str(follower.lost()) == "Rank 1 of this shard ended (signal 9)."


def _ignored(pid: int) -> set[int]:
    """Signals that a process ignores."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            mask = int(line.split()[1], 16)
            return {number for number in range(1, 32) if mask >> (number - 1) & 1}
    return set()
