"""The embedded Redis: both binaries, privacy, and an end together with its owner."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from orchestrator.embedded.redis import EmbeddedRedis, find_redis_server, packaged_redis_server
from orchestrator.errors import ConfigError, Unreachable

OWNER = """
import asyncio, sys
from orchestrator.embedded.redis import EmbeddedRedis

async def main() -> None:
    async with EmbeddedRedis() as redis:
        print(redis.pid, redis.url, file=sys.stderr)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def binaries() -> list[Path]:
    found = [find_redis_server(), packaged_redis_server()]
    return sorted({binary for binary in found if binary})


@pytest.mark.parametrize("binary", binaries(), ids=str)
async def test_a_stream_and_a_script_work_on_every_binary(binary: Path) -> None:
    async with EmbeddedRedis(binary=binary) as server, Redis.from_url(server.url) as client:
        await client.xadd("tickets", {"handle": "ab"})
        entries = await client.xrange("tickets")
        assert [fields for _, fields in entries] == [{b"handle": b"ab"}]
        assert await client.eval("return ARGV[1] + 1", 0, "41") == 42


async def test_it_listens_on_a_private_socket_only_and_keeps_nothing() -> None:
    async with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        socket = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        settings = {}
        for name in ("port", "save", "appendonly"):  # one at a time: Redis before 7 knows no lists
            settings |= await client.config_get(name)
        assert settings == {"port": "0", "save": "", "appendonly": "no"}
    assert not socket.parent.exists()


async def test_leaving_the_context_ends_the_server() -> None:
    async with EmbeddedRedis() as server:
        pid = server.pid
        ended = asyncio.create_task(server.wait())
    assert await asyncio.wait_for(ended, 10) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_two_servers_share_nothing() -> None:
    async with EmbeddedRedis() as one, EmbeddedRedis() as two:
        assert one.url != two.url
        async with Redis.from_url(one.url) as client, Redis.from_url(two.url) as other:
            await client.set("key", "value")
            assert await other.get("key") is None


async def test_a_given_folder_is_used_and_left_empty(tmp_path: Path) -> None:
    async with EmbeddedRedis(directory=tmp_path / "redis") as server:
        assert server.url == f"unix://{tmp_path}/redis/redis.sock"
    async with EmbeddedRedis(directory=tmp_path / "redis") as server, Redis.from_url(server.url) as client:
        assert await client.ping()
    assert list((tmp_path / "redis").iterdir()) == []


async def test_an_owner_that_is_killed_takes_the_server_along() -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert owner.stderr is not None
    pid, url = (await asyncio.wait_for(owner.stderr.readline(), 30)).split()
    server = os.pidfd_open(int(pid))
    try:
        owner.kill()
        await asyncio.wait_for(owner.wait(), 10)
        readable, _, _ = select.select([server], [], [], 10)
        assert readable == [server]
    finally:
        os.close(server)
        socket = Path(url.decode().removeprefix("unix://"))
        for leftover in socket.parent.iterdir():
            leftover.unlink()
        socket.parent.rmdir()


async def test_ctrl_c_in_the_owners_terminal_does_not_reach_the_server() -> None:
    async with EmbeddedRedis() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) != os.getsid(0)


async def test_the_owner_can_wait_for_a_server_that_dies() -> None:
    async with EmbeddedRedis() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(server.wait(), 10) == -signal.SIGKILL


async def test_a_binary_that_ends_at_once_is_one_sentence_with_its_last_words(tmp_path: Path) -> None:
    broken = script(tmp_path, "echo starting; echo 'no memory left'; exit 3")
    with pytest.raises(
        Unreachable, match=r"^The embedded Redis ended at once with code 3: no memory left\.$"
    ):
        async with EmbeddedRedis(binary=broken):
            pytest.fail("it cannot have started")


async def test_a_server_that_never_answers_is_stopped_and_reported(tmp_path: Path) -> None:
    silent = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    with pytest.raises(Unreachable, match=r"did not answer within 0\.5 s"):
        async with EmbeddedRedis(binary=silent, start_timeout_s=0.5):
            pytest.fail("it cannot have answered")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_path_too_long_for_a_socket_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a unix socket"):
        async with EmbeddedRedis(directory=tmp_path / ("x" * 120)):
            pytest.fail("it cannot have started")


def test_without_any_redis_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Debian package redis-server"):
        find_redis_server()


def script(folder: Path, text: str) -> Path:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
