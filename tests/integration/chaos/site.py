"""A whole deployment in processes of its own before fake shards: two conductors, two gateways, one Redis."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from orchestrator.deployment.gateway import bound_socket
from orchestrator.deployment.workers import Place
from orchestrator.embedded.redis import EmbeddedRedis, end_with_owner
from orchestrator.queues.keys import Keys
from tgi_patches.contract import Role

from .conduct import DEPLOYMENT
from .shards import LONG, Listening, SlowShard

PATIENCE_S = 40.0
REQUEST_TIMEOUT_S = 20
TOKENS = 12
SLOTS = 16
ROOT = Path(__file__).parents[3]
KEYS = Keys(DEPLOYMENT)


@dataclass(frozen=True)
class Ended:
    """How one request ended for its client: `done`, `refused` or `broken`."""

    kind: str
    tokens: int
    took_s: float
    text: str = ""


def outcomes(ended: Iterable[Ended]) -> Counter[tuple[str, int, str]]:
    """How many ended in each way."""
    return Counter((one.kind, one.tokens, one.text) for one in ended)


async def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for a condition of other processes, a plain or an async one."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        met = condition()
        if await met if asyncio.iscoroutine(met) else met:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S} s")


@dataclass
class Site:
    directory: Path
    server: EmbeddedRedis
    redis: Redis
    shards: list[SlowShard]
    http: httpx.AsyncClient
    conductors: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    gateways: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    """Of the gateways."""
    ended: list[Ended] = field(default_factory=list)

    # --- asking ---------------------------------------------------------------------------------

    async def ask(self, gateway: int, tokens: int = TOKENS) -> Ended:
        started_s = time.monotonic()
        kind, said, text = "broken", 0, ""
        words = " ".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=24))
        body = {"inputs": words, "parameters": {"max_new_tokens": tokens, "do_sample": False}}
        try:
            async with self.http.stream("POST", f"{self.urls[gateway]}/generate_stream", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith(("data:", "{")):
                        event = json.loads(line.removeprefix("data:"))
                        said += "token" in event
                        if event.get("generated_text"):
                            kind = "done"
                        elif "error" in event:
                            kind, text = "refused", event["error"]
        except httpx.TransportError as error:
            text = repr(error)
        ended = Ended(kind, said, time.monotonic() - started_s, text)
        self.ended.append(ended)
        return ended

    async def load(self, gateway: int, count: int, together: int) -> list[Ended]:
        """So many requests, some of them at once."""
        left = iter(range(count))
        ended: list[Ended] = []

        async def client() -> None:
            for _ in left:
                ended.append(await self.ask(gateway))

        async with asyncio.TaskGroup() as group:
            for _ in range(together):
                group.create_task(client())
        return ended

    @asynccontextmanager
    async def loaded(self, together: int) -> AsyncIterator[list[Ended]]:
        """Inside, each gateway has so many requests at any time; after it, all have ended."""
        ended: list[Ended] = []
        over = asyncio.Event()

        async def client(gateway: int) -> None:
            while not over.is_set():
                ended.append(await self.ask(gateway))

        async with asyncio.TaskGroup() as group:
            for gateway in range(len(self.urls)):
                for _ in range(together):
                    group.create_task(client(gateway))
            try:
                yield ended
            finally:
                over.set()

    # --- what is seen ---------------------------------------------------------------------------

    async def leader(self) -> str:
        return str(await self.redis.get(KEYS.leader) or "")

    async def reserved(self) -> dict[str, int]:
        found: dict[str, str] = await self.redis.hgetall(KEYS.reserved)
        return {name: int(amount) for name, amount in found.items()}

    async def clean(self) -> bool:
        """No counter, ticket or lease is left."""
        left = len(await self.reserved()) + int(await self.redis.xlen(KEYS.tickets))
        async for key in self.redis.scan_iter(KEYS.prefix + "*"):
            left += key.startswith((KEYS.leases(""), KEYS.queued("")))
        return left == 0

    async def status(self, gateway: int) -> dict[str, Any]:
        answer = await self.http.get(f"{self.urls[gateway]}/admin/status")
        told: dict[str, Any] = answer.json()
        return told

    async def serves(self, gateway: int) -> bool:
        """Knows the shards, and nothing is amiss."""
        told = await self.status(gateway)
        ready = [one for one in told["shards"] if one["state"] == "ready"]
        return told["degraded"] is None and len(ready) == len(self.shards)

    def most_legs(self, kind: Any) -> int:
        """How often the same leg of one request reached shards."""
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(shard.legs(kind))
        return max(total.values(), default=0)

    # --- starting -------------------------------------------------------------------------------

    def start_conductor(self) -> None:
        urls = {shard.shard: shard.url for shard in self.shards}
        command = [sys.executable, "-m", "tests.integration.chaos.conduct", self.server.url, json.dumps(urls)]
        process = self._start(command, os.environ, f"conductor-{len(self.conductors)}")
        self.conductors[process.pid] = process

    def start_gateway(self) -> None:
        name = f"gateway-{len(self.gateways)}"
        env = os.environ | {
            "ORCHESTRATOR_DEPLOYMENT": DEPLOYMENT,
            "ORCHESTRATOR_REDIS__URL": self.server.url,
            "ORCHESTRATOR_LIMITS__REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
        }
        with bound_socket("127.0.0.1", 0) as listener:
            os.set_inheritable(listener.fileno(), True)
            place = Place(0, 1, "", listener.fileno())
            command = [sys.executable, "-m", "orchestrator.commands.worker", place.to_json()]
            self.gateways.append(self._start(command, env, name, listener.fileno()))
            self.urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def _start(
        self, command: list[str], env: Any, name: str, fd: int | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdout=log,
                stderr=log,
                pass_fds=() if fd is None else (fd,),
                preexec_fn=end_with_owner(os.getpid()),
            )

    async def start_redis(self, stack: AsyncExitStack) -> None:
        """Again, with nothing in it, at the same address."""
        self.server = await stack.enter_async_context(EmbeddedRedis(self.directory))

    def last_words(self) -> str:
        """The end of every process' log, for a test that fails."""
        return "\n".join(
            f"{path.name}: ...{path.read_text()[-1500:]}" for path in sorted(self.directory.glob("*-*.log"))
        )


@asynccontextmanager
async def site(directory: Path, slots: int = SLOTS) -> AsyncIterator[tuple[Site, AsyncExitStack]]:
    """Ready inside; whatever happens, nothing of it is left afterwards."""
    shards = [SlowShard(f"{role}-0", role, slots) for role in (Role.PREFILL, Role.DECODE)]
    servers = [Listening(shard) for shard in shards]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedRedis(directory))
        redis = Redis.from_url(server.url, decode_responses=True, protocol=2)
        stack.push_async_callback(redis.aclose)
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=128)
        http = await stack.enter_async_context(
            httpx.AsyncClient(timeout=2 * REQUEST_TIMEOUT_S, limits=limits, trust_env=False)
        )
        for one in servers:
            stack.callback(one.listener.close)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for one in servers:
            group.create_task(one.serve(sockets=[one.listener]))
            stack.callback(setattr, one, "should_exit", True)
        made = Site(directory, server, redis, shards, http)
        stack.callback(_end, made)
        for _ in range(2):
            made.start_conductor()
        for _ in range(2):
            made.start_gateway()
        try:
            for gateway in range(2):
                await until(lambda gateway=gateway: _serves(made, gateway), "a gateway that serves")
            yield made, stack
        except BaseException as error:
            error.add_note(made.last_words())
            raise


async def _serves(made: Site, gateway: int) -> bool:
    try:
        return await made.serves(gateway)
    except httpx.TransportError:
        return False


def _end(made: Site) -> None:
    for process in (*made.conductors.values(), *made.gateways):
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(10)


__all__ = ["DEPLOYMENT", "LONG", "Ended", "Site", "site", "until"]
