"""Drives a TGI server step by step, as its router would, for tests that decide what joins what."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from orchestrator.embedded.shard.seam import Batch, Generation, ModelInfo, Request, Sampling, Stopping
from orchestrator.embedded.tgi.client import Connection
from orchestrator.embedded.tgi.model import ModelLimits, TgiModel
from orchestrator.embedded.tgi.schema import read_schema
from tests.tgi.servers import Server

LIMITS = ModelLimits(max_input_tokens=1024, max_total_tokens=2048, max_batch_prefill_tokens=1024)
CONNECT_LIMIT_S = 30.0
_batch_ids = itertools.count(1)


@asynccontextmanager
async def warm(
    server: Server, python: Path, limits: ModelLimits = LIMITS, *, again: bool = True
) -> AsyncIterator[TgiModel]:
    """A client of all ranks, after Warmup; not `again` for a server that has been warmed up before."""
    schema = await read_schema(str(python))
    async with AsyncExitStack() as stack:
        connections = []
        for rank in range(server.plan.ranks):
            opening = Connection.open(server.uds, schema, deadline_s=CONNECT_LIMIT_S, rank=rank)
            connections.append(await opening)
            stack.push_async_callback(connections[-1].close)
        lead, *others = connections
        model = TgiModel(lead, limits, others)
        if again:
            await model.warmup()
        yield model


class Slots:
    """Gives every request blocks of its own; block 0 is left to TGI's health check."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._next = 1

    def take(self, tokens: int) -> tuple[int, ...]:
        """Slots for `tokens` positions, in whole blocks; none where the model pads."""
        if self._info.padded:
            return ()
        size = self._info.block_size
        first, count = self._next, -(-(tokens + self._info.lookahead_tokens) // size)
        self._next += count
        return tuple(range(first * size, (first + count) * size))


def greedy(slots: Slots, number: int, text: str, ids: Sequence[int], new_tokens: int, **more: Any) -> Request:
    """A request for exactly `new_tokens` tokens; `more` are other fields of a Request."""
    return Request(
        id=number,
        inputs=text,
        input_ids=tuple(ids),
        sampling=Sampling(),
        stopping=Stopping(new_tokens, ignore_eos_token=True),
        slots=slots.take(len(ids) + new_tokens),
        **more,
    )


async def answers(model: TgiModel, requests: Sequence[Request]) -> dict[int, list[Generation]]:
    """Every step of every request, begun together and run until all have ended."""
    steps: dict[int, list[Generation]] = {request.id: [] for request in requests}
    done, cached = await model.prefill(Batch(next(_batch_ids), tuple(requests)))
    while True:
        for step in done:
            steps[step.request_id].append(step)
        if all(own and own[-1].generated_text for own in steps.values()):
            return steps
        assert cached is not None, "requests go on and the server has no batch"
        done, cached = await model.decode([cached])
