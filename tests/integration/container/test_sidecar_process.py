"""A sidecar as a process of its own: files of its shard on one side, HTTP on the other, pulls between two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.container.conftest import LIMIT_S, free_port, until
from tests.unit.sidecar.ranks import EPOCH, HANDLE, OTHER, TOKENS, Rank, fingerprint, spec_in
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.contract import (
    EPOCH_VARIABLE,
    KEY_VARIABLE,
    PROTOCOL_VERSION,
    MissReason,
    PullReply,
    PullRequest,
    Role,
    ShardSpec,
    StatusReply,
    WaitReply,
)
from tgi_patches.key import sign
from tgi_patches.sidecar.heartbeat import heartbeat_path

KEY = "0123456789abcdef"
INFO = {"max_input_tokens": 80, "max_total_tokens": 95}
METRICS = "tgi_batch_current_size 3\ntgi_queue_size 1\n"


class Beside:
    """One sidecar process at a time, always at the same address."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[str] | None = None

    def start(self, **more: str) -> None:
        env = self.spec.to_env() | {"PATH": os.defpath, EPOCH_VARIABLE: str(EPOCH), KEY_VARIABLE: KEY} | more
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "tgi_patches.sidecar"], env=env, stderr=subprocess.PIPE, text=True
        )

    def ready(self) -> dict[str, int]:
        """Its heartbeat file, once it is this process's own."""
        assert self.process is not None
        spec, pid = self.spec, self.process.pid
        path = heartbeat_path(Path(spec.arena_dir), spec.deployment, spec.shard)

        def own() -> dict[str, int] | None:
            with contextlib.suppress(OSError):
                told: dict[str, int] = json.loads(path.read_text())
                return told if told["pid"] == pid else None
            return None

        facts: dict[str, int] = until(own, "a sidecar that is ready")
        return facts

    def ended(self, number: int | None = None) -> tuple[int, str]:
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.spec.sidecar_port}"

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
async def router_port() -> AsyncIterator[int]:
    """TGI's router: healthy, and busy with three requests."""
    bodies = {"/health": "", "/info": json.dumps(INFO), "/metrics": METRICS}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + bodies[head.split()[1].decode()].encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # whoever asked was stopped
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    answering: set[asyncio.Task[None] | None] = set()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    tasks = [task for task in answering if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    made = Beside(spec_in(tmp_path / "arenas", ranks=2, sidecar_port=free_port()))
    yield made
    made.close()


async def healthy(url: str) -> None:
    """In a thread: the router is on this one's loop."""
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        await asyncio.to_thread(until, lambda: client.get("/health").status_code == 200, "a healthy shard")


async def status(client: httpx.AsyncClient) -> StatusReply:
    return StatusReply.from_dict((await client.get("/kv/status")).json())


async def test_a_sidecar_s_life(beside: Beside, router_port: int) -> None:
    spec = beside.spec
    beside.start(PORT=str(router_port))
    facts = await asyncio.to_thread(beside.ready)
    assert (facts["epoch"], facts["port"], facts["pull_port"]) == (EPOCH, spec.sidecar_port, 0)
    ranks = [Rank(spec, rank) for rank in range(2)]
    async with httpx.AsyncClient(base_url=beside.url, timeout=LIMIT_S) as client:
        before = await client.get("/health")
        assert before.status_code == 503
        assert before.json()["error"].startswith("The server of rank 0 has not reported")

        for rank in ranks:
            rank.says(exports={"ok": 7})
        await healthy(beside.url)
        found = await status(client)
        assert (found.hooked, found.exports, found.running, found.waiting) == (True, {"ok": 7}, 3, 1)
        assert (found.limits.max_input_tokens, found.limits.max_total_tokens) == (80, 95)
        assert found.arena_id == arena_id(Path(spec.arena_dir))

        waiting = asyncio.create_task(client.get(f"/kv/wait/{HANDLE}", params={"timeout_s": LIMIT_S}))
        gone = asyncio.create_task(client.get(f"/kv/wait/{OTHER}", params={"timeout_s": LIMIT_S}))
        await asyncio.sleep(0.2)  # so that both wait, which they need not for the answers to be right
        for rank in ranks:
            rank.export()
            rank.post()
        ranks[1].mail.failed(OTHER, MissReason.LAYOUT)
        reply = WaitReply.from_dict((await waiting).json())
        assert (reply.found, reply.first_token_id, reply.kv_bytes) == (True, 42, 192)
        assert (await gone).json()["reason"] == "layout"

        code, said = await asyncio.to_thread(beside.ended, signal.SIGTERM)
        assert (code, len(said.splitlines())) == (0, 1)  # no access log

        beside.start(PORT=str(router_port))
        await asyncio.to_thread(beside.ready)
        again = WaitReply.from_dict((await client.get(f"/kv/wait/{HANDLE}?timeout_s=0")).json())
        assert again == reply
        assert (await status(client)).exports == {"ok": 7}
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({EPOCH_VARIABLE: ""}, "The variable ORCHESTRATOR_SHARD_EPOCH must hold the epoch"),
        ({KEY_VARIABLE: "short"}, "The deployment's key must have at least 16 bytes."),
    ],
)
def test_what_cannot_work_is_one_sentence(beside: Beside, variables: dict[str, str], sentence: str) -> None:
    beside.start(**variables)
    code, said = beside.ended()
    assert (code, len(said.splitlines())) == (2, 1)
    assert said.startswith(sentence)


def test_an_address_that_is_taken_is_one_sentence(beside: Beside) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", beside.spec.sidecar_port))
        taken.listen()
        beside.start()
        code, said = beside.ended()
    address = f"127.0.0.1:{beside.spec.sidecar_port}"
    assert (code, said) == (2, f"The sidecar of p0 cannot listen on {address}: Address already in use.\n")


async def test_a_record_of_another_host_is_pulled_from_sidecar_to_sidecar(
    beside: Beside, tmp_path: Path
) -> None:
    """Two arena directories, as two hosts have; ranks and key as in production."""
    beside.spec = replace(beside.spec, pull_listen="127.0.0.1:0")
    decode = replace(
        spec_in(tmp_path / "other", ranks=2, role=Role.DECODE, sidecar_port=free_port()),
        shard="d0",
        pulled_bytes=8 << 20,
    )
    other = Beside(decode)
    ranks = [Rank(beside.spec, rank) for rank in range(2)]
    try:
        beside.start()
        other.start()
        pull_port = (await asyncio.to_thread(beside.ready))["pull_port"]
        await asyncio.to_thread(other.ready)
        armed = [Rank(decode, rank) for rank in range(2)]
        for rank in (*ranks, *armed):
            rank.says()
        for rank in ranks:
            rank.export()
        request = signed_pull(f"127.0.0.1:{pull_port}")
        async with httpx.AsyncClient(base_url=other.url, timeout=LIMIT_S) as client:
            reply = PullReply.from_dict((await client.post("/kv/pull", json=request)).json())
            forged = request | {"signature": "0" * 64}
            refused = PullReply.from_dict((await client.post("/kv/pull", json=forged)).json())
            here = await status(client)
        assert (reply.found, reply.shard, reply.kv_bytes, reply.reason) == (True, "d0.pulled", 192, "")
        assert (here.pulls, here.arena_id) == (True, arena_id(tmp_path / "other"))
        assert (refused.found, refused.reason) == (False, "unsupported")
        reader = ArenaBridge(tmp_path / "other", "dep", "d0", 0, 1, fingerprint(2), 0, 60.0)
        assert [reader.lookup(reply.shard, reply.epoch, HANDLE, rank).token_ids for rank in range(2)] == [
            TOKENS
        ] * 2
        reader.close()
        for rank in (*ranks, *armed):
            rank.close()
    finally:
        other.close()


def signed_pull(address: str) -> dict[str, Any]:
    request = PullRequest(PROTOCOL_VERSION, HANDLE, "p0", EPOCH, address, timeout_s=LIMIT_S)
    return replace(request, signature=sign(KEY.encode(), *request.signed())).to_dict()
