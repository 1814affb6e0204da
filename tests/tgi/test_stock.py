"""TGI as it is, without the overlay: on the stand-in for IPEX it answers what transformers answers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.tgi.model import TgiModel
from tests.tgi.reference import Reference, write_adapter
from tests.tgi.servers import ServerFailedError, ServerPlan, Servers
from tests.tgi.stepping import Slots, answers, greedy, warm

PROMPTS = (
    "Hello, my name is",
    "The capital of France is Paris. The capital of Italy is",
    "def add(a, b):\n",
    "Once upon a time there was a " + "very " * 70 + "large dog that",
    "一 二 三 四",
)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


async def tokens(
    model: TgiModel, reference: Reference, prompts: tuple[str, ...], adapters: tuple[str, ...] = ()
) -> list[list[int]]:
    """The answers to prompts that begin together, each with its adapter."""
    slots = Slots(await model.info())
    requests = [
        greedy(slots, number, prompt, reference.ids(prompt), NEW_TOKENS, adapter_id=adapter)
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters or [""] * len(prompts), strict=True))
    ]
    steps = await answers(model, requests)
    return [[step.token.id for step in steps[number]] for number in range(len(prompts))]


PLANS = {
    "flash": {},
    "flash, paged": {"attention": "paged"},
    "flash, speculating": {"flags": ("--speculate", "2")},
    "causal": {"flash": False},
}


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
async def test_in_float32_it_chooses_transformers_tokens_alone_and_in_a_batch(
    changes: dict[str, object],
    model: Path,
    servers: Servers,
    tgi_python: Path,
    reference: Reference,
    expected: list[list[int]],
) -> None:
    plan = replace(ServerPlan(model), **changes)  # type: ignore[arg-type]
    async with warm(servers.shared(plan), tgi_python) as tgi:
        info = await tgi.info()
        assert (info.padded, info.dtype, info.device) == (not plan.flash, "float32", "cpu")
        for prompt, chosen in zip(PROMPTS, expected, strict=True):
            assert await tokens(tgi, reference, (prompt,)) == [chosen]
        assert await tokens(tgi, reference, PROMPTS) == expected


async def test_its_kv_cache_takes_the_stand_ins_memory_and_a_quarter_per_token_in_float8(
    model: Path, servers: Servers, tgi_python: Path, reference: Reference, expected: list[list[int]]
) -> None:
    """30 layers of K and V, 3 heads of 64: 46080 bytes a token in float32, 256 MiB less TGI's 5 %."""
    plan = ServerPlan(model)
    kv_tokens = {}
    for kv_dtype, size in ((None, 4), ("fp8_e5m2", 1)):
        server = servers.shared(replace(plan, kv_dtype=kv_dtype))
        async with warm(server, tgi_python) as tgi:
            kv_tokens[size] = (await tgi.info()).kv_tokens
            first = [chosen[0] for chosen in await tokens(tgi, reference, PROMPTS)]
            assert sum(a == b[0] for a, b in zip(first, expected, strict=True)) >= 4
    blocks = {size: int((256 << 20) * 0.95) // (64 * 11520 * size) for size in kv_tokens}
    assert kv_tokens[4] - kv_tokens[1] == 64 * (blocks[4] - blocks[1])


async def test_bfloat16_is_served_where_it_is_asked_for(
    model: Path, servers: Servers, tgi_python: Path, reference: Reference, expected: list[list[int]]
) -> None:
    async with warm(servers.shared(ServerPlan(model, dtype="bfloat16")), tgi_python) as tgi:
        info = await tgi.info()
        assert (info.padded, info.dtype) == (False, "bfloat16")
        first = [chosen[0] for chosen in await tokens(tgi, reference, PROMPTS)]
        assert first == [chosen[0] for chosen in expected]


async def test_lora_adapters_answer_like_merged_weights_also_side_by_side(
    model: Path, servers: Servers, tgi_python: Path, tmp_path: Path, reference: Reference
) -> None:
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("red", "blue"))}
    env = {"LORA_ADAPTERS": ",".join(f"{name}={folder}" for name, folder in folders.items())}
    merged = {"": reference, **{name: Reference(model, folder) for name, folder in folders.items()}}
    adapters = ("red", "", "blue", "red")
    expected = [merged[name].greedy(PROMPTS[0], NEW_TOKENS) for name in adapters]
    assert len({tuple(chosen) for chosen in expected}) == 3
    with servers.own(ServerPlan(model, env=env)) as server:
        async with warm(server, tgi_python) as tgi:
            assert await tokens(tgi, reference, (PROMPTS[0],) * 4, adapters) == expected
            for name, chosen in zip(adapters[:3], expected, strict=False):
                assert await tokens(tgi, reference, PROMPTS[:1], (name,)) == [chosen]


def test_a_server_that_cannot_start_says_why(servers: Servers, tmp_path: Path) -> None:
    plan = ServerPlan(tmp_path)
    with pytest.raises(ServerFailedError, match=r"(?s)ended with code 1 before it was ready.*model type"):
        servers.own(plan).__enter__()


def test_several_ranks_come_up_and_stop_together(servers: Servers, tiny: Path) -> None:
    with servers.own(ServerPlan(tiny, ranks=2)) as server:
        assert all(server.socket(rank).is_socket() for rank in range(2))
        assert server.alive
    assert [process.returncode for process in server.processes] == [0, 0]


def test_equal_plans_share_a_server_until_it_ends(servers: Servers, tiny: Path) -> None:
    first = servers.shared(ServerPlan(tiny, env={"A": "1"}))
    assert servers.shared(ServerPlan(tiny, env={"A": "1"})) is first
    first.processes[0].terminate()
    first.processes[0].wait(30)
    second = servers.shared(ServerPlan(tiny, env={"A": "1"}))
    assert second is not first
    assert second.alive


def test_no_more_shared_servers_run_than_are_kept(
    tiny: Path, tgi_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plans 0, 1, 0, 2 with room for two, 1 was asked for longest ago."""
    monkeypatch.setattr("tests.tgi.servers.KEPT", 2)
    mine = Servers(tgi_python, tmp_path)
    with contextlib.closing(mine):
        plans = [ServerPlan(tiny, env={"A": str(number)}) for number in range(3)]
        started = {number: mine.shared(plans[number]) for number in (0, 1, 0, 2)}
        assert [started[number].alive for number in range(3)] == [True, False, True]
    assert not any(server.alive for server in started.values())
