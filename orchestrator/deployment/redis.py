"""The deployment's own Redis: started again at the same socket when it ends before we do."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.errors import OrchestratorError

log = structlog.get_logger(__name__)

FOLDER_PREFIX = "tgi-orchestrator-redis-"
PAUSE_S = 1.0


@contextlib.asynccontextmanager
async def kept_redis() -> AsyncIterator[str]:
    """The URL of a private server that runs inside the block.  Raises what the first start raises."""
    directory = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    keep = asyncio.create_task(_keep(directory, first), name="embedded redis")
    try:
        yield await first
    finally:
        keep.cancel()
        await asyncio.gather(keep, return_exceptions=True)
        shutil.rmtree(directory, ignore_errors=True)


async def _keep(directory: Path, first: asyncio.Future[str]) -> None:
    """Gateways go on without Redis for a while, and tell a new one what they hold."""
    while True:
        try:
            async with EmbeddedRedis(directory) as redis:
                if not first.done():
                    first.set_result(redis.url)
                log.warning("redis_relaunched", exit_code=await redis.wait())
        except OrchestratorError as error:
            if not first.done():
                first.set_exception(error)
                return
            log.error("redis_not_relaunched", error=str(error))
            await asyncio.sleep(PAUSE_S)


def remove_left_over(redis_url: str) -> None:
    """Remove the folder of a server whose `up` was killed; touches nothing that is not ours."""
    folder = Path(urlsplit(redis_url).path).parent
    ours = folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(FOLDER_PREFIX)
    if redis_url.startswith("unix:") and ours:
        shutil.rmtree(folder, ignore_errors=True)
