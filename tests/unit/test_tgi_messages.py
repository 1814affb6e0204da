"""Seam facts as TGI's messages and back: fields as TGI's router sets them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.embedded.shard.seam import (
    Batch,
    CachedBatch,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    Sampling,
    Stopping,
    Token,
)
from orchestrator.embedded.tgi.messages import (
    batch_of,
    cached_from,
    cached_of,
    generations_from,
    info_from,
    warmup_of,
)
from tests.integration.tgi.protocol import message

PAGED = ModelInfo("", "float32", 0, 0, 0, 0, block_size=4, chunked=True)
PADDED = replace(PAGED, chunked=False, padded=True)
SAMPLING = Sampling(
    do_sample=True,
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    typical_p=0.25,
    repetition_penalty=1.5,
    frequency_penalty=-0.5,
    seed=2**63 - 1,
    watermark=True,
    grammar="[0-9]+",
)
REQUEST = Request(
    id=9,
    inputs="six seven",
    input_ids=(5, 6, 7, 8, 9, 10),
    sampling=SAMPLING,
    stopping=Stopping(3, ("\n", "end"), ignore_eos_token=True),
    slots=(12, 13, 14, 15, 8, 9, 10, 11),
    adapter_id="lora|kv1:put:" + "0" * 32,
    top_n_tokens=2,
    add_special_tokens=False,
    cache_len=2,
    chunk_len=3,
    prefill_logprobs=True,
)


def sent(request: Request, info: ModelInfo = PAGED) -> Any:
    return batch_of(message, Batch(1, (request,)), info).requests[0]


def test_a_request_travels_whole() -> None:
    made = sent(REQUEST)
    assert (made.id, made.inputs, made.input_chunks.chunks[0].text) == (9, "six seven", "six seven")
    assert (made.adapter_id, made.top_n_tokens, made.add_special_tokens) == (REQUEST.adapter_id, 2, False)
    assert (made.prefill_logprobs, made.cache_len, made.chunk_len) == (True, 2, 3)
    rules = made.parameters
    assert (rules.do_sample, rules.temperature, rules.top_k, rules.top_p) == (True, 0.5, 7, 0.75)
    assert (rules.typical_p, rules.repetition_penalty, rules.frequency_penalty) == (0.25, 1.5, -0.5)
    assert (rules.seed, rules.watermark, rules.grammar) == (2**63 - 1, True, "[0-9]+")
    assert rules.grammar_type == 2
    stopping = made.stopping_parameters
    assert (stopping.max_new_tokens, stopping.ignore_eos_token) == (3, True)
    assert list(stopping.stop_sequences) == ["\n", "end"]


def test_blocks_are_those_of_the_slots_in_order() -> None:
    made = sent(REQUEST)
    assert list(made.slots) == [12, 13, 14, 15, 8, 9, 10, 11]
    assert list(made.blocks) == [3, 2]
    assert list(sent(replace(REQUEST, slots=(20, 21, 22, 23, 24))).blocks) == [5, 6]


def test_the_server_cuts_the_prompt_where_we_did() -> None:
    assert sent(REQUEST).truncate == 6
    assert sent(replace(REQUEST, input_ids=(1,), cache_len=0, chunk_len=0)).truncate == 1


def test_no_adapter_and_no_grammar_are_absent() -> None:
    made = sent(replace(REQUEST, adapter_id="", sampling=Sampling()))
    assert not made.HasField("adapter_id")
    assert (made.parameters.grammar, made.parameters.grammar_type) == ("", 0)


@pytest.mark.parametrize(
    ("chunk_len", "cache_len", "info"),
    [
        (0, 0, PAGED),  # the whole prompt
        (4, 2, PAGED),  # all that is not cached
        (5, 2, PAGED),  # more than that: TGI would fail the batch
        (3, 0, replace(PAGED, chunked=False)),
    ],
)
def test_a_chunk_is_named_only_where_the_prompt_is_split(
    chunk_len: int, cache_len: int, info: ModelInfo
) -> None:
    made = sent(replace(REQUEST, chunk_len=chunk_len, cache_len=cache_len), info)
    assert not made.HasField("chunk_len")


def test_a_batch_counts_its_first_step_and_its_most_blocks() -> None:
    other = replace(REQUEST, id=10, slots=(0, 1, 2), cache_len=0, chunk_len=0)
    batch = batch_of(message, Batch(7, (REQUEST, other)), PAGED)
    assert (batch.id, batch.size, batch.max_blocks) == (7, 2, 2)
    assert batch.max_tokens == 3 + 6  # a chunk of the first, the whole second


def test_a_padded_batch_has_no_blocks_and_counts_rows_at_the_longest_prompt() -> None:
    short = replace(REQUEST, id=10, input_ids=(1, 2), slots=(), cache_len=0, chunk_len=0)
    long = replace(short, id=11, input_ids=tuple(range(10)), stopping=Stopping(5))
    batch = batch_of(message, Batch(7, (short, long)), PADDED)
    assert batch.max_blocks == 0
    assert batch.max_tokens == 2 * 10 + 3 + 5
    assert not batch.requests[0].blocks
    assert not batch.requests[0].slots


def test_a_running_batch_keeps_its_name_and_size() -> None:
    made = cached_of(message, CachedBatch(5, (1, 2, 4), 30))
    assert (made.id, list(made.request_ids), made.size, made.current_tokens) == (5, [1, 2, 4], 3, 30)
    assert cached_from(made) == CachedBatch(5, (1, 2, 4), 30)


def test_info_follows_the_server() -> None:
    told = message("InfoResponse")(
        requires_padding=False,
        dtype="torch.bfloat16",
        device_type="cuda",
        speculate=2,
        support_chunking=True,
        use_prefix_caching=True,
        attention_impl="flashinfer",
        block_size=1,
    )
    info = info_from(told, kv_tokens=640)
    assert (info.dtype, info.device, info.attention, info.kv_tokens) == (
        "bfloat16",
        "cuda",
        "flashinfer",
        640,
    )
    assert (info.block_size, info.lookahead_tokens, info.padded) == (1, 2, False)
    assert info.chunked
    assert info.prefix_caching
    told.requires_padding = True
    assert not info_from(told, 0).prefix_caching


def test_the_warmup_fills_the_prefill_budget_with_the_longest_prompts() -> None:
    made = warmup_of(message, prefill_tokens=25, max_input_tokens=10, max_total_tokens=12, padded=False)
    assert [request.truncate for request in made.batch.requests] == [10, 10, 5]
    assert [r.stopping_parameters.max_new_tokens for r in made.batch.requests] == [2, 2, 7]
    assert {request.id for request in made.batch.requests} == {0}
    assert {request.top_n_tokens for request in made.batch.requests} == {20}
    assert made.batch.requests[0].inputs.split() == ["_test"] * 10
    assert not made.batch.requests[0].blocks
    assert (made.batch.size, made.batch.max_tokens) == (3, 10)
    assert (made.max_input_tokens, made.max_prefill_tokens, made.max_total_tokens) == (10, 25, 12)


def test_the_warmup_of_a_padded_model_is_one_short_prompt() -> None:
    made = warmup_of(message, prefill_tokens=4096, max_input_tokens=4095, max_total_tokens=4096, padded=True)
    assert [request.truncate for request in made.batch.requests] == [32]
    assert made.max_prefill_tokens == 4096


def told(**fields: Any) -> Any:
    return message("DecodeResponse")(generations=[message("Generation")(request_id=4, **fields)])


def tokens(*ids: int) -> Any:
    count = len(ids)
    return message("Tokens")(
        ids=ids, logprobs=[-0.5] * count, texts=[str(i) for i in ids], is_special=[i == 2 for i in ids]
    )


def test_one_token_is_one_step() -> None:
    assert generations_from(told(tokens=tokens(7)), {}) == [Generation(4, Token(7, "7", -0.5, False))]


def test_under_speculation_several_tokens_are_several_steps_and_the_last_one_ends_it() -> None:
    ending = message("GeneratedText")(
        text="782", generated_tokens=3, finish_reason="FINISH_REASON_EOS_TOKEN", seed=0
    )
    lists = [tokens(7, 1), tokens(8, 1), tokens(2, 1)]
    steps = generations_from(
        told(tokens=tokens(7, 8, 2), generated_text=ending, top_tokens=lists), {4: "hit"}
    )
    assert [step.token for step in steps] == [
        Token(7, "7", -0.5, False),
        Token(8, "8", -0.5, False),
        Token(2, "2", -0.5, True),
    ]
    assert [step.top_tokens[0].id for step in steps] == [7, 8, 2]
    assert [step.generated_text for step in steps] == [None, None, GeneratedText("782", 3, "eos_token", 0)]
    assert [step.import_result for step in steps] == ["hit", "", ""]


@pytest.mark.parametrize(
    ("told_reason", "reason"),
    [
        ("FINISH_REASON_LENGTH", "length"),
        ("FINISH_REASON_EOS_TOKEN", "eos_token"),
        ("FINISH_REASON_STOP_SEQUENCE", "stop_sequence"),
    ],
)
def test_finish_reasons_are_known_by_name_and_a_seed_only_where_there_is_one(
    told_reason: str, reason: str
) -> None:
    ending = message("GeneratedText")(text="7", generated_tokens=1, finish_reason=told_reason)
    (step,) = generations_from(told(tokens=tokens(7), generated_text=ending), {})
    assert step.generated_text is not None
    assert (step.generated_text.finish_reason, step.generated_text.seed) == (reason, None)


def test_prompt_logprobs_begin_with_the_second_token_and_come_once() -> None:
    prompt = message("Tokens")(ids=[5, 6, 7], logprobs=[math.nan, -1.5, -2.5])
    first, second = generations_from(told(tokens=tokens(7, 8), prefill_tokens=prompt), {})
    assert first.prompt_logprobs == (-1.5, -2.5)
    assert second.prompt_logprobs == ()
