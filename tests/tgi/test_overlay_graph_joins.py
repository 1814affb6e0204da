"""Steps of imported prompts as decodes, in float32: they answer as a stock server, and do run as decodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Request, Sampling, Stopping
from tests.tgi.pair import ARENA_BYTES, Models, Prompt, Trio, arena_folder, member, told
from tests.tgi.prompts import twenty
from tests.tgi.servers import ROOT, STAND_IN, ServerPlan, Servers
from tests.tgi.test_overlay_mixed import CHUNKS, Run, assert_as_alone, hit, miss, three
from tgi_patches.hooks.graph_joins import VARIABLE

PROBE = Path(__file__).resolve().parent / "graph_probe"


@dataclass(slots=True)
class Watched:
    """A trio whose get server writes down how it computed each forward."""

    trio: Trio
    log: Path

    def forwards(self) -> list[str]:
        """`prefill`, `decode` or `graph`, and the rows, of every forward since the last call."""
        found = self.log.read_text().split("\n")[:-1]
        self.log.write_text("")
        return found


def watched(
    servers: Servers, model: Path, python: Path, log: Path, *, switch: str, graphs: str
) -> Iterator[Watched]:
    """`graphs`: sizes, as CUDA_GRAPHS has them."""
    plan = ServerPlan(model)
    log.write_text("")
    env = {
        VARIABLE: switch,
        "GRAPH_PROBE": str(log),
        "GRAPH_PROBE_SIZES": graphs,
        "PYTHONPATH": os.pathsep.join(map(str, (PROBE, STAND_IN, ROOT))),
    }
    with (
        arena_folder() as folder,
        member(servers, plan, "put", folder, arena_bytes=ARENA_BYTES) as put,
        member(servers, replace(plan, env=env), "get", folder) as get,
        servers.own(plan) as stock,
    ):
        yield Watched(Trio(put, get, stock, python), log)


@pytest.fixture(scope="module")
def joins(
    servers: Servers, model: Path, tgi_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """With graphs of 2 and 4 rows: one row runs in a graph of two, five rows run in none."""
    log = tmp_path_factory.mktemp("probe") / "forwards"
    yield from watched(servers, model, tgi_python, log, switch="1", graphs="2,4")


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[Prompt]:
    return twenty(model)


async def legs(models: Models, asked: list[Request]) -> list[Request]:
    return [await hit(models, request) for request in asked]


async def test_hits_alone_answer_as_a_stock_server_and_no_forward_is_a_prefill(
    joins: Watched, prompts: list[Prompt]
) -> None:
    async with joins.trio.models() as models:
        for number in (0, 5, 9, 12, 14):
            [asked] = three(models, prompts, number)
            [leg] = await legs(models, [asked])
            run = Run(models.get)
            joins.forwards()
            await run.finish(await run.prefill(leg))
            assert joins.forwards() == ["graph 2"] * 10
            assert run.steps[asked.id][0].import_result == "hit"
            await assert_as_alone(models, run, [asked])
        assert joins.trio.get.report.faults == 0


async def test_several_hits_share_a_graph_and_more_than_it_holds_run_as_a_decode_without_one(
    joins: Watched, prompts: list[Prompt]
) -> None:
    async with joins.trio.models() as models:
        for numbers, expected in (((4, 9, 13), "graph 4"), ((4, 9, 13, 5, 6), "decode 5")):
            asked = three(models, prompts, *numbers)
            started = await legs(models, asked)
            run = Run(models.get)
            joins.forwards()
            await run.finish(await run.prefill(*started))
            assert joins.forwards() == [expected] * 10
            await assert_as_alone(models, run, asked)


async def test_a_hit_joins_a_running_batch_inside_one_step(joins: Watched, prompts: list[Prompt]) -> None:
    """With chunks TGI adds the new row to the running ones first and computes all of them together."""
    async with joins.trio.models(CHUNKS) as models:
        plain, joining, later = three(models, prompts, 6, 13, 4)
        run = Run(models.get)
        first, second = await legs(models, [joining, later])
        joins.forwards()
        running = await run.prefill(plain)
        running = await run.prefill(first, joins=running)
        running = await run.decode(running, times=2)
        running = await run.prefill(second, joins=running)
        assert joins.forwards() == ["prefill 1", "graph 2", "graph 2", "graph 2", "graph 4"]
        await run.finish(running)
        assert [run.steps[r.id][0].import_result for r in (plain, joining, later)] == ["", "hit", "hit"]
        await assert_as_alone(models, run, (plain, joining, later))


async def test_a_hit_joins_a_running_batch_in_a_step_of_its_own(
    joins: Watched, prompts: list[Prompt]
) -> None:
    """Without chunks TGI computes the new row alone and adds it afterwards."""
    async with joins.trio.models() as models:
        plain, joining = three(models, prompts, 5, 13)
        run = Run(models.get)
        [leg] = await legs(models, [joining])
        joins.forwards()
        running = await run.decode(await run.prefill(plain), times=2)
        new = await run.prefill(leg)
        running = await run.decode(running, new)
        assert joins.forwards() == ["prefill 1", *["graph 2"] * 4]
        await run.finish(running)
        await assert_as_alone(models, run, (plain, joining))


async def test_a_step_with_a_miss_or_a_plain_prompt_stays_a_prefill(
    joins: Watched, prompts: list[Prompt]
) -> None:
    async with joins.trio.models() as models:
        for other in ("plain", "miss"):
            found, asked = three(models, prompts, 9, 6)
            [leg] = await legs(models, [found])
            beside = asked if other == "plain" else await miss(models, asked)
            run = Run(models.get)
            joins.forwards()
            await run.finish(await run.prefill(leg, beside))
            assert joins.forwards() == ["prefill 2", *["graph 2"] * 9]
            await assert_as_alone(models, run, (found, asked))


async def test_a_prompt_of_one_token_without_a_handle_is_a_prefill_as_ever(
    joins: Watched, prompts: list[Prompt]
) -> None:
    async with joins.trio.models() as models:
        [token_id, *_] = prompts[4].ids
        asked = models.ask(Prompt("x", (token_id,)), Stopping(3, ignore_eos_token=True))
        run = Run(models.get)
        joins.forwards()
        await run.finish(await run.prefill(asked))
        assert joins.forwards() == ["prefill 1", "graph 2", "graph 2"]
        await assert_as_alone(models, run, [asked])


async def test_sampling_and_likeliest_tokens_are_those_of_a_stock_server(
    joins: Watched, prompts: list[Prompt]
) -> None:
    async with joins.trio.models() as models:
        sampled = Sampling(do_sample=True, temperature=0.9, seed=11)
        for sampling in (sampled, Sampling(repetition_penalty=1.3)):
            asked = models.ask(prompts[6], Stopping(8), sampling=sampling, top_n_tokens=3)
            separated = await models.separated(asked)
            alone = await models.colocated(asked)
            assert [step.token.id for step in separated] == [step.token.id for step in alone]
            assert told(separated)[0] == told(alone)[0]


async def test_without_the_switch_a_hit_is_a_prefill(
    servers: Servers, model: Path, tgi_python: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    for off in watched(servers, model, tgi_python, tmp_path / "forwards", switch="0", graphs="2,4"):
        async with off.trio.models() as models:
            [asked] = three(models, prompts, 6)
            [leg] = await legs(models, [asked])
            run = Run(models.get)
            off.forwards()
            await run.finish(await run.prefill(leg))
            assert off.forwards() == ["prefill 1", *["graph 2"] * 9]
