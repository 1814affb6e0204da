"""The deployment's own Redis comes back at the same address, and leaves nothing when it is done."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from orchestrator.deployment import redis as kept
from orchestrator.errors import ConfigError


async def server_pid(url: str) -> int:
    """Process id of the server at `url`, as soon as it answers."""
    while True:
        async with Redis.from_url(url) as client:
            try:
                return int((await client.info("server"))["process_id"])
            except (OSError, RedisError):
                await asyncio.sleep(0.01)


async def test_a_redis_that_dies_is_started_again_at_the_same_socket() -> None:
    async with kept.kept_redis() as url, asyncio.timeout(30):
        first = await server_pid(url)
        os.kill(first, signal.SIGKILL)
        second = await server_pid(url)
        assert second != first
    assert not Path(urlsplit(url).path).parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_a_first_start_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("orchestrator.embedded.redis.packaged_redis_server", lambda: None)
    with pytest.raises(ConfigError, match="no redis-server"):
        async with kept.kept_redis():
            pass


def test_only_a_folder_of_ours_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours, other = tmp_path / f"{kept.FOLDER_PREFIX}abc", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        kept.remove_left_over(f"unix://{folder}/redis.sock")
    kept.remove_left_over(f"redis://host:6379{ours}/x")
    assert (ours.exists(), other.exists()) == (False, True)
