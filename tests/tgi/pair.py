"""A put server and a get server with the overlay, and a stock server that answers the same alone."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.embedded.shard.seam import Generation, Request, Sampling, Stopping
from orchestrator.embedded.tgi.model import ModelLimits, TgiModel
from tests.tgi.servers import Server, ServerPlan, Servers
from tests.tgi.stepping import Slots, answers, warm
from tgi_patches.contract import EPOCH_VARIABLE, GetTag, PutTag, ShardSpec, new_epoch, new_handle
from tgi_patches.report import Report, read_report, report_path

DEPLOYMENT = "tests"
ARENA_BYTES = 192 << 20
LIMITS = ModelLimits(max_input_tokens=640, max_total_tokens=1024, max_batch_prefill_tokens=640)


@dataclass(slots=True)
class Member:
    """One server of a pair and what its overlay was told."""

    server: Server
    spec: ShardSpec
    epoch: int

    @property
    def report(self) -> Report:
        """What its overlay says of itself."""
        return self.report_of(0)

    def report_of(self, rank: int) -> Report:
        path = report_path(Path(self.spec.arena_dir), self.spec.deployment, self.spec.shard, rank)
        report = read_report(path)
        assert report is not None, f"no report at {path}"
        return report

    @property
    def reports(self) -> list[Report]:
        """Of all ranks."""
        return [self.report_of(rank) for rank in range(self.server.plan.ranks)]

    @property
    def arena(self) -> Path:
        return self.arena_of(0)

    def arena_of(self, rank: int) -> Path:
        return Path(self.spec.arena_dir) / self.spec.deployment / f"{self.spec.shard}.{rank}.arena"


@contextmanager
def member(servers: Servers, plan: ServerPlan, shard: str, folder: Path, **spec: Any) -> Iterator[Member]:
    """A server with the overlay, as shard `shard` with its arena in `folder`."""
    epoch = new_epoch()
    told = ShardSpec(
        DEPLOYMENT,
        shard,
        "mixed",
        str(plan.model),
        "test-model",
        arena_dir=str(folder),
        **spec,  # type: ignore[arg-type]
    )
    env = {**plan.env, **told.to_env(), EPOCH_VARIABLE: str(epoch)}
    with servers.own(replace(plan, overlay=True, env=env)) as server:
        yield Member(server, told, epoch)


@contextmanager
def arena_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tgi-tests-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class Trio:
    """The servers of one configuration."""

    put: Member
    get: Member
    stock: Server
    python: Path
    _warmed: dict[Path, ModelLimits] = field(default_factory=dict)

    @asynccontextmanager
    async def models(self, limits: ModelLimits = LIMITS) -> AsyncIterator[Models]:
        """Clients of the three, warmed up for `limits`."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(self._client(server, limits))
                for server in (self.put.server, self.get.server, self.stock)
            ]
            yield Models(self, *clients, Slots(await clients[0].info()))

    @asynccontextmanager
    async def _client(self, server: Server, limits: ModelLimits) -> AsyncIterator[TgiModel]:
        """A server that is warmed up for these limits is not warmed up again."""
        again = self._warmed.get(server.uds) != limits
        async with warm(server, self.python, limits, again=again) as model:
            self._warmed[server.uds] = limits
            yield model


@contextmanager
def trio(
    servers: Servers, plan: ServerPlan, python: Path, *, ranks: tuple[int, int] = (1, 1), **get_spec: Any
) -> Iterator[Trio]:
    """The three servers of `plan`, each with the same number of threads; `ranks` of put and get server."""
    put_plan, get_plan = (replace(plan, ranks=count) for count in ranks)
    with (
        arena_folder() as folder,
        member(servers, put_plan, "put", folder, arena_bytes=ARENA_BYTES) as put,
        member(servers, get_plan, "get", folder, **get_spec) as get,
        servers.own(plan) as stock,
    ):
        yield Trio(put, get, stock, python)


@dataclass(slots=True)
class Models:
    """Clients, and the blocks that requests take; every server gets the same slots for a request."""

    trio: Trio
    put: TgiModel
    get: TgiModel
    stock: TgiModel
    slots: Slots
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def ask(self, prompt: Prompt, stopping: Stopping, **more: Any) -> Request:
        """A request; `more` are other fields of a Request."""
        defaults: dict[str, Any] = {"sampling": Sampling(), "adapter_id": ""}
        return Request(
            id=next(self._numbers),
            inputs=prompt.text,
            input_ids=prompt.ids,
            stopping=stopping,
            slots=self.slots.take(len(prompt.ids) + stopping.max_new_tokens),
            **defaults | more,
        )

    async def put_leg(
        self, asked: Request, adapter: str = "", *, pinned: bool = False
    ) -> tuple[str, Generation]:
        """Export the request's prompt; its handle and what the put leg answered."""
        handle = new_handle()
        tag = PutTag(handle, adapter, pinned)
        leg = replace(asked, stopping=replace(asked.stopping, max_new_tokens=1), adapter_id=str(tag))
        steps = await answers(self.put, [leg])
        return handle, steps[leg.id][0]

    def get_tag(self, handle: str, first: int | None, adapter: str = "", **other: Any) -> str:
        source: dict[str, Any] = {"shard": "put", "epoch": self.trio.put.epoch}
        return str(GetTag(handle, first_token_id=first, adapter=adapter, **source | other))

    async def separated(self, asked: Request, adapter: str = "") -> list[Generation]:
        """The request's steps on the get server, its prompt's KV from the put server."""
        handle, first = await self.put_leg(asked, adapter)
        leg = replace(asked, adapter_id=self.get_tag(handle, first.token.id, adapter))
        steps = (await answers(self.get, [leg]))[leg.id]
        assert steps[0].token == first.token
        return steps

    async def colocated(self, asked: Request) -> list[Generation]:
        """The same on the stock server, where it is alone."""
        return (await answers(self.stock, [asked]))[asked.id]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: tuple[int, ...]


def told(steps: Sequence[Generation]) -> list[tuple[Any, ...]]:
    """All that a client could see of an answer, exactly."""
    return [(step.token, step.top_tokens, step.generated_text) for step in steps]


def tokens(steps: Sequence[Generation]) -> list[int]:
    return [step.token.id for step in steps]


def logprobs(steps: Sequence[Generation]) -> list[float]:
    return [step.token.logprob for step in steps]
