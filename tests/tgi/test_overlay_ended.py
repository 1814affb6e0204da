"""A put leg makes one token: its record and its answer say whether the request itself has ended with that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Generation, Request, Stopping
from tests.tgi.features import SMALL_CACHE, same, with_end_tokens
from tests.tgi.pair import ARENA_BYTES, Models, Prompt, Trio, arena_folder, member, tokens, told
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.reference import Reference
from tests.tgi.servers import ServerPlan, Servers
from tgi_patches.sidecar.records import Records

NEW_TOKENS = 8
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "ship", "harbour")


@pytest.fixture(scope="module")
def second_end(tiny: Path) -> tuple[str, int]:
    """A prompt, and its first token, that the model of these tests knows as an end."""
    return WORDS[0], Reference(tiny).greedy(WORDS[0], 1)[0]


@pytest.fixture(scope="module")
def two_ends(tiny: Path, tmp_path_factory: pytest.TempPathFactory, second_end: tuple[str, int]) -> Path:
    end_id = tokenizer_of(tiny).eos_token_id
    return with_end_tokens(tiny, tmp_path_factory.mktemp("ends") / "two", [end_id, second_end[1]])


@pytest.fixture(scope="module", params=["flash", "causal"])
def alone(
    request: pytest.FixtureRequest, servers: Servers, two_ends: Path, tgi_python: Path
) -> Iterator[Trio]:
    """One server that exports, imports what it exported, and serves requests without a handle as stock."""
    plan = ServerPlan(two_ends, flash=request.param == "flash", env=SMALL_CACHE)
    with (
        arena_folder() as folder,
        member(servers, plan, "put", folder, arena_bytes=ARENA_BYTES) as started,
    ):
        yield Trio(started, started, started.server, tgi_python)
        assert started.report.faults == 0


@pytest.fixture(scope="module")
def prompts(tiny: Path) -> list[Prompt]:
    tokenizer = tokenizer_of(tiny)
    return [prompt_of(tokenizer, " ".join(WORDS[: count + 1])) for count in range(len(WORDS))]


async def says_ended(models: Models, asked: Request) -> bool:
    """What the record of a put leg says to another process; the leg's own answer says the same."""
    put = models.trio.put
    handle, first = await models.put_leg(asked)
    fingerprint = put.report.fingerprint
    assert fingerprint is not None
    with closing(Records(put.spec, put.epoch, lambda: fingerprint)) as records:
        record = records.own_lookup(handle)
    assert record.first.id == first.token.id
    if record.ended:
        assert told([first]) == told(await models.colocated(asked))
    else:
        assert reason([first]) == "length"
    return record.ended


def reason(steps: list[Generation]) -> str:
    ending = steps[-1].generated_text
    assert ending is not None
    return ending.finish_reason


async def stoppable(models: Models, prompts: list[Prompt]) -> tuple[Prompt, str, str]:
    """A prompt whose answer goes on, and its first two tokens, both readable."""
    for prompt in prompts:
        steps = await models.colocated(models.ask(prompt, Stopping(NEW_TOKENS)))
        if len(steps) > 2 and len(steps[0].token.text) > 1:
            return prompt, steps[0].token.text, steps[1].token.text
    raise AssertionError("no prompt of these begins with a token of two characters")


async def test_an_end_token_ends_it_unless_the_request_ignores_it(alone: Trio, prompts: list[Prompt]) -> None:
    async with alone.models() as models:
        seen = set()
        for prompt in prompts:
            asked = models.ask(prompt, Stopping(NEW_TOKENS))
            colocated = await models.colocated(asked)
            at_once = len(colocated) == 1 and reason(colocated) == "eos_token"
            assert await says_ended(models, asked) == at_once
            ignoring = models.ask(prompt, Stopping(NEW_TOKENS, ignore_eos_token=True))
            assert not await says_ended(models, ignoring)
            assert len(await same(models, ignoring)) == NEW_TOKENS
            seen.add(at_once)
        assert seen == {True, False}


@pytest.mark.parametrize("alone", ["flash"], indirect=True)
async def test_any_of_several_end_tokens_ends_it(
    alone: Trio, prompts: list[Prompt], second_end: tuple[str, int]
) -> None:
    text, end_id = second_end
    prompt = next(prompt for prompt in prompts if prompt.text == text)
    async with alone.models() as models:
        asked = models.ask(prompt, Stopping(NEW_TOKENS))
        assert tokens(await models.colocated(asked)) == [end_id]
        assert await says_ended(models, asked)


@pytest.mark.parametrize(
    ("stops", "at_once"),
    [
        (("{first}",), True),
        (("{first_end}",), True),
        (("nowhere", "{first}"), True),
        (("{first_begin}",), False),
        (("{prompt_end}{first}",), False),
        (("nowhere",), False),
    ],
)
async def test_a_stop_string_ends_it_where_the_first_token_completes_it(
    stops: tuple[str, ...], at_once: bool, alone: Trio, prompts: list[Prompt]
) -> None:
    """Of generated text alone: what stands in the prompt does not count."""
    async with alone.models() as models:
        prompt, first, _ = await stoppable(models, prompts)
        written = {
            "first": first,
            "first_end": first[-1],
            "first_begin": first[:-1],
            "prompt_end": prompt.text[-3:],
        }
        stopping = Stopping(NEW_TOKENS, tuple(stop.format(**written) for stop in stops))
        asked = models.ask(prompt, stopping)
        colocated = await models.colocated(asked)
        assert (len(colocated) == 1 and reason(colocated) == "stop_sequence") == at_once
        assert await says_ended(models, asked) == at_once


async def test_a_stop_string_across_the_first_two_tokens_ends_the_get_leg(
    alone: Trio, prompts: list[Prompt]
) -> None:
    async with alone.models() as models:
        prompt, first, second = await stoppable(models, prompts)
        asked = models.ask(prompt, Stopping(NEW_TOKENS, (first[-1] + second,)))
        assert not await says_ended(models, asked)
        steps = await same(models, asked)
        assert (len(steps), reason(steps)) == (2, "stop_sequence")


async def test_a_stop_string_ends_it_also_where_end_tokens_are_ignored(
    alone: Trio, prompts: list[Prompt]
) -> None:
    async with alone.models() as models:
        prompt, first, _ = await stoppable(models, prompts)
        asked = models.ask(prompt, Stopping(NEW_TOKENS, (first,), ignore_eos_token=True))
        assert len(await models.colocated(asked)) == 1
        assert await says_ended(models, asked)


@pytest.mark.parametrize("alone", ["flash"], indirect=True)
async def test_prompt_logprobs_that_the_server_was_not_told_to_compute_do_not_keep_it_from_importing(
    alone: Trio, prompts: list[Prompt]
) -> None:
    async with alone.models() as models:
        steps = await same(models, models.ask(prompts[3], Stopping(NEW_TOKENS), prefill_logprobs=True))
        assert steps[0].prompt_logprobs == ()
