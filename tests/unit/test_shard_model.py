"""The transformers model behind the seam, against transformers' own generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.shard.attention import KVPool
from orchestrator.embedded.shard.loading import Loaded, load
from orchestrator.embedded.shard.model import TransformersModel
from orchestrator.embedded.shard.seam import Batch, CachedBatch, Generation, Request, Sampling, Stopping
from tgi_patches.bridge import FirstToken, Planes, Record
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import BridgeMiss, Fingerprint, GetTag, MissReason, PutTag, new_handle
from tgi_patches.kv.in_place import PoolBytes
from tgi_patches.relay import Relay

BLOCK = 4
PROMPT = "the ship left the harbour before the sun rose"


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Loaded:
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


class World:
    """One or more models that share weights; each has its own KV pool."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.models: list[TransformersModel] = []
        self.wire = MemoryHost()

    def model(
        self, bridge: MemoryBridge | None = None, *, chunk_tokens: int = 0
    ) -> tuple[TransformersModel, Relay | None]:
        pool = KVPool.create(
            layers=self.loaded.layers,
            blocks=256,
            block_size=BLOCK,
            kv_heads=self.loaded.kv_heads,
            head_dim=self.loaded.head_dim,
            dtype=self.loaded.dtype,
        )
        relay = None
        if bridge is not None:
            relay = Relay(
                bridge,
                published=lambda _: None,
                failed=lambda _handle, _reason: None,
                warn=lambda _event, **_facts: None,
            )
        model = TransformersModel(self.loaded, pool, relay, threads=1, chunk_tokens=chunk_tokens)
        self.models.append(model)
        return model, relay


@pytest.fixture
def world(loaded: Loaded) -> Iterator[World]:
    made = World(loaded)
    yield made
    for model in made.models:
        model.close()


def ids_of(loaded: Loaded, text: str) -> tuple[int, ...]:
    return tuple(loaded.tokenizer(text)["input_ids"])


def request(
    request_id: int,
    ids: tuple[int, ...],
    new_tokens: int,
    *,
    first_slot: int = 0,
    scatter: int = 1,
    tag: str = "",
    chunk_len: int = 0,
    sampling: Sampling | None = None,
    top_n_tokens: int = 0,
) -> Request:
    """`scatter` > 1 leaves gaps between slots, so that nothing is consecutive."""
    slots = tuple(first_slot + scatter * p for p in range(len(ids) + new_tokens - 1))
    return Request(
        id=request_id,
        inputs="",
        input_ids=ids,
        sampling=sampling or Sampling(),
        stopping=Stopping(new_tokens, ignore_eos_token=True),
        slots=slots,
        adapter_id=tag,
        chunk_len=chunk_len,
        top_n_tokens=top_n_tokens,
    )


async def run(model: TransformersModel, *requests: Request) -> dict[int, list[Generation]]:
    """Prefill all at once, then decode until nothing runs."""
    steps: dict[int, list[Generation]] = {r.id: [] for r in requests}
    generations, cached = await model.prefill(Batch(1, requests))
    while True:
        for generation in generations:
            steps[generation.request_id].append(generation)
        if cached is None:
            return steps
        generations, cached = await model.decode([cached])


def tokens(steps: list[Generation]) -> list[int]:
    return [generation.token.id for generation in steps]


def expected(reference: Any, ids: tuple[int, ...], new_tokens: int) -> list[int]:
    import torch

    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(token) for token in out[0, len(ids) :]]


@pytest.mark.parametrize("scatter", [1, 3])
async def test_greedy_tokens_equal_transformers_generate(world: World, reference: Any, scatter: int) -> None:
    model, _ = world.model()
    ids = ids_of(world.loaded, PROMPT)
    steps = await run(model, request(7, ids, 24, scatter=scatter))
    assert tokens(steps[7]) == expected(reference, ids, 24)
    ending = steps[7][-1].generated_text
    assert ending is not None
    assert (ending.finish_reason, ending.generated_tokens) == ("length", 24)
    assert [step.generated_text for step in steps[7][:-1]] == [None] * 23


async def test_logprobs_equal_those_of_one_full_forward(world: World, reference: Any) -> None:
    import torch

    model, _ = world.model()
    ids = ids_of(world.loaded, PROMPT)
    steps = (await run(model, request(7, ids, 12)))[7]
    chosen = tokens(steps)
    with torch.no_grad():
        logits = reference(torch.tensor([[*ids, *chosen]])).logits[0, len(ids) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(chosen)[:, None])[:, 0].tolist()
    assert [step.token.logprob for step in steps] == pytest.approx(wanted, abs=1e-4)


async def test_requests_of_one_batch_do_not_see_each_other(world: World, reference: Any) -> None:
    model, _ = world.model()
    prompts = [ids_of(world.loaded, text) for text in (PROMPT, "one", "def add(first, second):" * 3)]
    requests = [request(i, ids, 10 + i, first_slot=200 * i) for i, ids in enumerate(prompts)]
    steps = await run(model, *requests)
    for i, ids in enumerate(prompts):
        assert tokens(steps[i]) == expected(reference, ids, 10 + i)


async def test_joining_and_filtering_leave_the_others_unchanged(world: World, reference: Any) -> None:
    model, _ = world.model()
    first, second = ids_of(world.loaded, PROMPT), ids_of(world.loaded, "one two three")
    _, running = await model.prefill(Batch(1, (request(1, first, 9), request(2, second, 9, first_slot=200))))
    assert running is not None
    steps, running = await model.decode([running])
    kept = await model.filter_batch(running.id if running else 0, (1,))
    generations, joined = await model.prefill(Batch(2, (request(3, second, 4, first_slot=400),)))
    out = {1: [g for g in steps if g.request_id == 1], 3: generations}
    batches: list[CachedBatch] = [kept, *([joined] if joined else [])]
    while batches:
        steps, cached = await model.decode(batches)
        for step in steps:
            out[step.request_id].append(step)
        batches = [cached] if cached else []
    assert tokens(out[1]) == expected(reference, first, 9)[1:]
    assert tokens(out[3]) == expected(reference, second, 4)


@pytest.mark.parametrize("chunk", [1, 3, 7])
async def test_a_prompt_in_chunks_gives_the_same_tokens(world: World, reference: Any, chunk: int) -> None:
    model, _ = world.model(chunk_tokens=chunk)
    ids = ids_of(world.loaded, PROMPT)
    steps = await run(model, request(1, ids, 6, chunk_len=chunk))
    assert tokens(steps[1]) == expected(reference, ids, 6)


async def test_a_running_batch_steps_along_with_a_chunk(world: World, reference: Any) -> None:
    model, _ = world.model(chunk_tokens=4)
    first, second = ids_of(world.loaded, "one two"), ids_of(world.loaded, PROMPT)
    out: dict[int, list[Generation]] = {1: [], 2: []}
    steps, cached = await model.prefill(Batch(1, (request(1, first, 12),)))
    out[1] += steps
    steps, cached = await model.prefill(
        Batch(2, (request(2, second, 3, first_slot=200, chunk_len=3),)), cached
    )
    assert [step.request_id for step in steps] == [1]
    while cached is not None:
        for step in steps:
            out[step.request_id].append(step)
        steps, cached = await model.decode([cached])
    for step in steps:
        out[step.request_id].append(step)
    assert tokens(out[1]) == expected(reference, first, 12)
    assert tokens(out[2]) == expected(reference, second, 3)


async def test_top_n_tokens_are_the_likeliest_in_order(world: World) -> None:
    model, _ = world.model()
    steps = (await run(model, request(1, ids_of(world.loaded, PROMPT), 3, top_n_tokens=3)))[1]
    for step in steps:
        assert len(step.top_tokens) == 3
        assert step.top_tokens[0].id == step.token.id
        logprobs = [token.logprob for token in step.top_tokens]
        assert logprobs == sorted(logprobs, reverse=True)


async def test_a_prefill_that_nobody_reads_is_given_up_between_layers(world: World) -> None:
    model, _ = world.model()
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        return asked < 2

    batch = Batch(1, (request(1, ids_of(world.loaded, PROMPT), 5),), wanted)
    assert await model.prefill(batch) == ([], None)
    assert asked == 2 == world.loaded.layers
    assert len((await run(model, request(2, ids_of(world.loaded, PROMPT), 5)))[2]) == 5


@pytest.mark.parametrize("chunk", [0, 2])
async def test_prompt_logprobs_are_those_of_one_full_forward(
    world: World, reference: Any, chunk: int
) -> None:
    import torch

    model, _ = world.model(chunk_tokens=chunk)
    ids = ids_of(world.loaded, PROMPT)
    asked = replace(request(1, ids, 3, chunk_len=chunk), prefill_logprobs=True)
    plain = request(2, ids_of(world.loaded, "one two"), 3, first_slot=200)
    steps = await run(model, asked, plain)
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert list(steps[1][0].prompt_logprobs) == pytest.approx(wanted, abs=1e-4)
    assert tokens(steps[1]) == expected(reference, ids, 3)
    assert all(step.prompt_logprobs == () for step in [*steps[1][1:], *steps[2]])


# --- put and get ---


def fingerprint(loaded: Loaded) -> Fingerprint:
    return Fingerprint("m", "r", "t", "float32", "float32", loaded.layers, loaded.kv_heads, loaded.head_dim)


def bridges(world: World, count: int = 2) -> list[MemoryBridge]:
    return [
        MemoryBridge(
            world.wire, f"s{i}", 100 + i, fingerprint(world.loaded), arena_bytes=1 << 20, record_ttl_s=60
        )
        for i in range(count)
    ]


SAMPLED = Sampling(do_sample=True, temperature=0.9, top_k=40, seed=11)
PENALISED = Sampling(repetition_penalty=1.4)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, PENALISED], ids=["greedy", "seeded", "penalty"])
@pytest.mark.parametrize("scatter", [1, 2])
async def test_a_get_leg_continues_exactly_as_one_shard_would(
    world: World, sampling: Sampling, scatter: int
) -> None:
    alone, _ = world.model()
    source, target = bridges(world)
    prefill, put_relay = world.model(source)
    decode, get_relay = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    whole = (await run(alone, request(1, ids, 15, sampling=sampling)))[1]

    put = (
        await run(prefill, request(1, ids, 1, scatter=scatter, tag=str(PutTag(handle)), sampling=sampling))
    )[1]
    tag = GetTag(handle, "s0", 100, put[0].token.id)
    got = (await run(decode, request(5, ids, 15, first_slot=37, tag=str(tag), sampling=sampling)))[5]

    assert put_relay is not None
    assert get_relay is not None
    assert dict(put_relay.exports) == {"ok": 1}
    assert dict(get_relay.imports) == {"hit": 1}
    assert got[0].import_result == "hit"
    assert tokens(got) == tokens(whole)
    assert [g.token.text for g in got] == [g.token.text for g in whole]
    assert [g.token.logprob for g in got] == pytest.approx([g.token.logprob for g in whole], abs=1e-5)
    assert got[-1].generated_text == whole[-1].generated_text


async def test_the_decode_shard_really_uses_the_imported_bytes(world: World) -> None:
    """Were the KV recomputed, a record with other values could not change the answer."""
    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, _ = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle))))
    other, forged = tuple(reversed(ids)), new_handle()
    pool = prefill._pool
    await run(prefill, request(2, other, 1, first_slot=300))
    planes = PoolBytes(pool.layers).outbox(range(300, 300 + len(ids)))
    source.export(forged, ids, FirstToken(5, -1.0), False, planes)
    true = (await run(decode, request(1, ids, 8, tag=str(GetTag(handle, "s0", 100, 5)))))[1]
    false = (await run(decode, request(2, ids, 8, first_slot=300, tag=str(GetTag(forged, "s0", 100, 5)))))[2]
    assert (true[0].import_result, false[0].import_result) == ("hit", "hit")
    assert tokens(true)[1:] != tokens(false)[1:]


async def test_hit_miss_and_plain_requests_share_a_batch(world: World, reference: Any) -> None:
    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, relay = world.model(target)
    ids, other, handle = ids_of(world.loaded, PROMPT), ids_of(world.loaded, "one two"), new_handle()
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle))))
    wanted, wanted_other = expected(reference, ids, 6), expected(reference, other, 6)
    steps = await run(
        decode,
        request(1, ids, 6, tag=str(GetTag(handle, "s0", 100, wanted[0]))),
        request(2, ids, 6, first_slot=200, tag=str(GetTag(new_handle(), "s0", 100, wanted[0]))),
        request(3, other, 6, first_slot=400),
    )
    assert [tokens(steps[i]) for i in (1, 2, 3)] == [wanted, wanted, wanted_other]
    assert relay is not None
    assert dict(relay.imports) == {"hit": 1, "missing": 1}


async def test_a_first_token_is_forced_on_a_miss_too(world: World) -> None:
    _, target = bridges(world)
    decode, _ = world.model(target)
    ids = ids_of(world.loaded, PROMPT)
    steps = (await run(decode, request(1, ids, 2, tag=str(GetTag(new_handle(), "s0", 100, 9)))))[1]
    assert tokens(steps)[0] == 9
    assert steps[0].import_result == "missing"


async def test_a_first_token_that_is_not_the_records_is_forced_with_this_shards_logprob(
    world: World, reference: Any
) -> None:
    import torch

    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, _ = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    put = (await run(prefill, request(1, ids, 1, tag=str(PutTag(handle)))))[1]
    other = put[0].token.id + 1
    steps = (await run(decode, request(1, ids, 2, tag=str(GetTag(handle, "s0", 100, other)))))[1]
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert (steps[0].token.id, steps[0].import_result) == (other, "hit")
    assert steps[0].token.logprob == pytest.approx(float(logprobs[other]), abs=1e-4)


async def test_a_get_leg_that_names_no_token_samples_its_own(world: World) -> None:
    """Of a record whose first token was drawn with another seed."""
    alone, _ = world.model()
    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, _ = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    hot = replace(SAMPLED, temperature=3.0)
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle)), sampling=hot))
    answers = set()
    for seed in (1, 2, 3):
        sampling = replace(hot, seed=seed)
        wanted = (await run(alone, request(1, ids, 5, sampling=sampling)))[1]
        tag = str(GetTag(handle, "s0", 100))
        got = (await run(decode, request(1, ids, 5, tag=tag, sampling=sampling)))[1]
        assert (tokens(got), got[0].import_result) == (tokens(wanted), "hit")
        answers.add(tuple(tokens(got)))
    assert len(answers) == 3


async def test_an_old_epoch_and_other_tokens_are_counted_misses(world: World, reference: Any) -> None:
    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, relay = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle))))
    wanted = expected(reference, ids, 4)
    stale = (await run(decode, request(1, ids, 4, tag=str(GetTag(handle, "s0", 99, wanted[0])))))[1]
    shorter = ids[:-1]
    differs = (await run(decode, request(2, shorter, 4, tag=str(GetTag(handle, "s0", 100)))))[2]
    assert relay is not None
    assert dict(relay.imports) == {"epoch": 1, "tokens_differ": 1}
    assert tokens(stale) == wanted
    assert tokens(differs) == expected(reference, shorter, 4)


async def test_a_damaged_block_is_a_counted_miss_and_the_answer_is_right(
    world: World, reference: Any
) -> None:
    source, target = bridges(world)
    prefill, _ = world.model(source)
    decode, relay = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle))))
    source.damage(handle, 100)
    wanted = expected(reference, ids, 6)
    got = (await run(decode, request(1, ids, 6, tag=str(GetTag(handle, "s0", 100, wanted[0])))))[1]
    assert relay is not None
    assert dict(relay.imports) == {"checksum": 1}
    assert tokens(got) == wanted


class BrokenBridge(MemoryBridge):
    """Fails in every verb, with an error that no bridge should raise."""

    def export(
        self, handle: str, token_ids: object, first: FirstToken, ended: bool, planes: Planes
    ) -> Record:
        raise RuntimeError("disk on fire")

    def lookup(self, shard: str, epoch: int, handle: str) -> Record:
        raise RuntimeError("disk on fire")


async def test_a_bridge_that_raises_never_fails_a_request(world: World, reference: Any) -> None:
    bridge = BrokenBridge(
        world.wire, "s0", 100, fingerprint(world.loaded), arena_bytes=1 << 20, record_ttl_s=60
    )
    model, relay = world.model(bridge)
    ids = ids_of(world.loaded, PROMPT)
    wanted = expected(reference, ids, 5)
    put = (await run(model, request(1, ids, 1, tag=str(PutTag(new_handle())))))[1]
    got = (await run(model, request(2, ids, 5, tag=str(GetTag(new_handle(), "s1", 1, wanted[0])))))[2]
    assert tokens(put) == wanted[:1]
    assert tokens(got) == wanted
    assert relay is not None
    assert dict(relay.exports) == {"error": 1}
    assert dict(relay.imports) == {"error": 1}


class TornBridge(MemoryBridge):
    """Writes garbage into the pool and then reports that the record was overwritten meanwhile."""

    def read_into(self, record: Record, planes: Planes, tokens: int) -> None:
        for plane in planes:
            for run_view in plane:
                run_view[:] = b"\x7f" * len(run_view)
        raise BridgeMiss(MissReason.OVERWRITTEN)


async def test_a_read_that_fails_half_way_leaves_no_trace_in_the_answer(world: World, reference: Any) -> None:
    (source,) = bridges(world, 1)
    prefill, _ = world.model(source)
    target = TornBridge(
        world.wire, "s1", 101, fingerprint(world.loaded), arena_bytes=1 << 20, record_ttl_s=60
    )
    decode, relay = world.model(target)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    await run(prefill, request(1, ids, 1, tag=str(PutTag(handle))))
    wanted = expected(reference, ids, 6)
    got = (await run(decode, request(1, ids, 6, tag=str(GetTag(handle, "s0", 100, wanted[0])))))[1]
    assert tokens(got) == wanted
    assert relay is not None
    assert dict(relay.imports) == {"overwritten": 1}


async def test_a_put_that_ends_at_its_first_token_says_so(world: World) -> None:
    source, _ = bridges(world)
    prefill, _ = world.model(source)
    ids, handle = ids_of(world.loaded, PROMPT), new_handle()
    first = (await run(prefill, request(1, ids, 1)))[1][0].token
    ends = Request(
        id=2,
        inputs="",
        input_ids=ids,
        sampling=Sampling(),
        stopping=Stopping(1, stop_sequences=(first.text,)),
        slots=tuple(range(len(ids))),
        adapter_id=str(PutTag(handle)),
    )
    steps = (await run(prefill, ends))[2]
    assert steps[0].generated_text is not None
    assert steps[0].generated_text.finish_reason == "stop_sequence"
    assert source.own_lookup(handle).ended
