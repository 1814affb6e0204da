"""The hooks of CausalLM around stand-ins: padded caches, and batches of which only a part was found."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from tests.unit.overlay_stand_ins.causal import CausalShard, kv
from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tests.unit.overlay_stand_ins.messages import (
    DECODE_BIAS,
    FINGERPRINT,
    OWN,
    PROMPT,
    SUM,
    VOCAB,
    WHOLE_KV,
    ask,
    expected_logprob,
    get_tag,
    handle,
    pin_tag,
    put_tag,
    tokens,
)
from tests.unit.overlay_stand_ins.tokens import EOS, LENGTH, STOP
from tgi_patches.bridge import Bridge
from tgi_patches.bridge.memory import MemoryBridge
from tgi_patches.contract import BridgeMiss, Fingerprint
from tgi_patches.hooks.rows import rows_of
from tgi_patches.kv import padded

SHORT = [2, 2]
LONG = [1, 1, 1, 1, 1, 1, 2]


@pytest.fixture
def prefill(host: Host) -> CausalShard:
    return CausalShard(host, "p")


@pytest.fixture
def decode(host: Host) -> CausalShard:
    return CausalShard(host, "d", bias=DECODE_BIAS)


def exported(prefill: CausalShard, number: int = 1, prompt: list[int] = PROMPT) -> None:
    prefill.prefill(ask(put_tag(number), token_ids=prompt, max_new_tokens=1))
    assert prefill.report.exports["ok"] >= 1


# --- put and get ---


@pytest.mark.parametrize("legacy", [False, True])
def test_an_import_computes_one_token_and_leaves_the_exported_kv(
    host: Host, prefill: CausalShard, legacy: bool
) -> None:
    """Models that answer with tuples, and those whose caches refuse lists."""
    exported(prefill)
    decode = CausalShard(host, "d", bias=DECODE_BIAS, legacy=legacy)
    (generation,), batch = decode.step(decode.batch(ask(get_tag(1, first=SUM))))
    assert decode.model.tokens_computed == [1]
    assert (generation.token_id, generation.logprob) == (SUM, expected_logprob(0))
    assert kv(batch, row=0, tokens=5) == WHOLE_KV
    (following,), _ = decode.step(batch)
    assert following.token_id == (SUM + SUM + DECODE_BIAS) % VOCAB
    assert decode.report.imports == {"hit": 1}
    assert decode.report.faults == 0


def test_a_batch_of_hits_alone_is_padded_to_the_longest(prefill: CausalShard, decode: CausalShard) -> None:
    for number, prompt in enumerate([PROMPT, SHORT, LONG, [6]], start=1):
        exported(prefill, number, prompt)
    prompts = {4: [6], 2: SHORT, 1: PROMPT, 3: LONG}
    firsts = {4: 6, 2: 4, 1: SUM, 3: 8}
    batch = decode.batch(*(ask(get_tag(n, firsts[n]), n, token_ids=prompt) for n, prompt in prompts.items()))
    generations, batch = decode.step(batch)
    assert decode.model.tokens_computed == [1]
    assert decode.model.positions == [[0], [1], [4], [6]]
    assert tokens(generations) == firsts
    for row, prompt in enumerate(prompts.values()):
        assert kv(batch, row, len(prompt))[:2] == [prompt, prompt]
    generations, _ = decode.step(batch)
    assert tokens(generations) == {
        n: (sum(prompt) + firsts[n] + DECODE_BIAS) % VOCAB for n, prompt in prompts.items()
    }


def test_a_row_of_a_padded_batch_is_exported_without_its_padding(
    prefill: CausalShard, decode: CausalShard
) -> None:
    prefill.prefill(
        ask(put_tag(1), 1, token_ids=SHORT), ask(put_tag(2), 2, token_ids=LONG), ask(put_tag(3), 3)
    )
    assert prefill.report.exports == {"ok": 3}
    _, batch = decode.step(decode.batch(ask(get_tag(1), token_ids=SHORT)))
    assert kv(batch, row=0, tokens=2) == [[2, 2], [2, 2], [102, 102], [202, 202]]
    _, batch = decode.step(decode.batch(ask(get_tag(3))))
    assert kv(batch, row=0, tokens=5) == WHOLE_KV


@pytest.mark.parametrize(
    ("token_ids", "tag", "reason"),
    [
        (PROMPT, get_tag(2), "missing"),
        (PROMPT, f"|kv1:get:p.4:{handle(1)}:-", "epoch"),
        ([3, 1, 4, 1, 6], get_tag(1), "tokens_differ"),
    ],
)
def test_a_miss_is_a_stock_prefill(
    prefill: CausalShard, decode: CausalShard, token_ids: list[int], tag: str, reason: str
) -> None:
    exported(prefill)
    answered = tokens(decode.prefill(ask(tag, token_ids=token_ids)))
    assert answered == {1: (sum(token_ids) + DECODE_BIAS) % VOCAB}
    assert decode.model.tokens_computed == [5]
    assert decode.report.imports == {reason: 1}


def test_a_miss_begins_with_the_token_that_its_handle_names(decode: CausalShard) -> None:
    (generation,), batch = decode.step(decode.batch(ask(get_tag(1, first=25))))
    assert generation.token_id == 25
    assert generation.logprob == pytest.approx(expected_logprob(DECODE_BIAS) - 9.0)
    assert tokens(decode.step(batch)[0]) == {1: (SUM + 25 + DECODE_BIAS) % VOCAB}


def test_top_tokens_of_a_hit_are_the_exported_ones(prefill: CausalShard, decode: CausalShard) -> None:
    sent = prefill.prefill(ask(put_tag(1), top_n_tokens=3))[0].top
    (generation,), batch = decode.step(decode.batch(ask(get_tag(1, first=SUM), top_n_tokens=3)))
    assert generation.top == sent
    assert generation.top[0][0] == SUM
    assert decode.step(batch)[0][0].top[0][0] == (SUM + SUM + DECODE_BIAS) % VOCAB


def test_hits_whose_handles_name_no_token_begin_with_their_own(
    prefill: CausalShard, decode: CausalShard
) -> None:
    """Beside a reader of the same record whose handle names one."""
    sent = prefill.prefill(ask(put_tag(1), top_n_tokens=3))[0].top
    asked = ask(get_tag(1), 1, top_n_tokens=3), ask(get_tag(1, first=SUM), 2, top_n_tokens=3)
    generations, batch = decode.step(decode.batch(*asked))
    assert decode.model.tokens_computed == [1]
    assert tokens(generations) == {1: OWN, 2: SUM}
    assert generations[0].logprob == pytest.approx(expected_logprob(DECODE_BIAS), rel=1e-3)
    assert generations[0].top[0] == (OWN, generations[0].logprob)
    assert generations[1].top == sent
    assert [kv(batch, row, tokens=5) for row in (0, 1)] == [WHOLE_KV, WHOLE_KV]
    assert tokens(decode.step(batch)[0]) == {
        1: (SUM + OWN + DECODE_BIAS) % VOCAB,
        2: (SUM + SUM + DECODE_BIAS) % VOCAB,
    }


def test_a_pinned_record_is_a_hit_after_a_turn_of_the_ring(host: Host, decode: CausalShard) -> None:
    """150 records of 700 bytes, in a ring of 64 KiB."""
    prefill = CausalShard(host, "p", pinned_bytes=4096)
    prefill.prefill(ask(pin_tag(1), 1), ask(put_tag(2), 2))
    assert prefill.report.exports == {"ok": 1, "pinned": 1}
    for number in range(100, 250):
        prefill.prefill(ask(put_tag(number), max_new_tokens=1))
    decode.prefill(ask(get_tag(1), 1), ask(get_tag(2), 2))
    assert decode.report.imports == {"hit": 1, "overwritten": 1}


def test_prompt_logprobs_need_the_whole_prompt(prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    decode.prefill(ask(get_tag(1), prefill_logprobs=True))
    assert decode.model.tokens_computed == [5]
    assert decode.report.imports == {"unsupported": 1}


@pytest.mark.parametrize(
    ("options", "ended", "finish"),
    [
        ({"max_new_tokens": 1}, False, LENGTH),
        ({"max_new_tokens": 1, "eos_token_ids": {SUM}}, True, EOS),
        ({"max_new_tokens": 1, "eos_token_ids": {0}}, False, LENGTH),
        ({"max_new_tokens": 1, "eos_token_ids": {SUM}, "ignore_eos_token": True}, False, LENGTH),
        ({"max_new_tokens": 1, "stop_sequences": ("x", "o")}, True, STOP),
        ({"max_new_tokens": 1, "stop_sequences": ("fo",)}, False, LENGTH),
        (
            {"max_new_tokens": 1, "eos_token_ids": {SUM}, "ignore_eos_token": True, "stop_sequences": ("o",)},
            True,
            STOP,
        ),
        ({"max_new_tokens": 2}, False, None),
        ({"max_new_tokens": 2, "eos_token_ids": {SUM}}, True, EOS),
    ],
)
def test_a_put_leg_ends_by_eos_or_stop_string_before_it_ends_by_length(
    options: dict[str, Any], ended: bool, finish: str | None, host: Host, prefill: CausalShard
) -> None:
    """Token 14 is "o", the prompt's last one "f".  TGI alone would say `length` for all of one token."""
    asked = ask(put_tag(1), 1, **options), ask("", 2, token_ids=LONG, max_new_tokens=1, eos_token_ids={8})
    answered = prefill.prefill(*asked)
    assert [generation.finish for generation in answered] == [finish, LENGTH]
    assert host.memory_bridge("reader", FINGERPRINT, 0).lookup("p", 3, handle(1)).ended is ended


# --- hits and others in one batch ---


def test_hits_and_others_are_run_apart_and_go_on_together(prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    batch = decode.batch(
        ask(get_tag(9), 1, token_ids=LONG), ask(get_tag(1, first=SUM), 2), ask("", 3, token_ids=SHORT)
    )
    generations, batch = decode.step(batch)
    assert decode.model.tokens_computed == [1, 7]
    own = {1: 8 + DECODE_BIAS, 3: 4 + DECODE_BIAS}
    assert tokens(generations) == {2: SUM, **own}
    assert decode.report.imports == {"hit": 1, "missing": 1}
    following, _ = decode.step(batch)
    assert decode.model.tokens_computed == [1, 7, 1]
    assert tokens(following) == {
        1: (8 + own[1] + DECODE_BIAS) % VOCAB,
        2: (SUM + SUM + DECODE_BIAS) % VOCAB,
        3: (4 + own[3] + DECODE_BIAS) % VOCAB,
    }


def test_a_put_beside_a_hit_is_exported(host: Host, prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    decode.prefill(ask(get_tag(1), 1), ask(put_tag(5), 2, token_ids=LONG))
    assert (decode.report.imports, decode.report.exports) == ({"hit": 1}, {"ok": 1})
    third = CausalShard(host, "e")
    assert tokens(third.prefill(ask(get_tag(5, first=8 + DECODE_BIAS, shard="d"), token_ids=LONG))) == {
        1: 8 + DECODE_BIAS
    }


def test_when_the_hits_end_at_once_the_others_go_on(prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    generations, left = decode.step(
        decode.batch(ask(get_tag(1), 1, max_new_tokens=1), ask("", 2, token_ids=SHORT))
    )
    assert set(tokens(generations)) == {1, 2}
    assert [request.id for request in left.requests] == [2]
    assert tokens(decode.step(left)[0]) == {2: (4 + 4 + DECODE_BIAS + DECODE_BIAS) % VOCAB}


def test_when_all_end_at_once_nothing_is_left(prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    generations, left = decode.step(
        decode.batch(ask(get_tag(1, first=SUM), 1, max_new_tokens=1), ask("", 2, max_new_tokens=1))
    )
    assert tokens(generations) == {1: SUM, 2: OWN}
    assert left is None


def test_a_joined_batch_takes_another_one_in(prefill: CausalShard, decode: CausalShard) -> None:
    """TGI's concatenate leaves lists, which newer caches refuse."""
    exported(prefill)
    _, first = decode.step(decode.batch(ask(get_tag(1, first=SUM), 1)))
    _, second = decode.step(decode.batch(ask("", 2, token_ids=LONG)))
    both = decode.module.CausalLMBatch.concatenate([first, second])
    assert tokens(decode.step(both)[0]) == {
        1: (SUM + SUM + DECODE_BIAS) % VOCAB,
        2: (8 + 8 + DECODE_BIAS + DECODE_BIAS) % VOCAB,
    }


def test_rows_are_dropped_with_their_first_token(prefill: CausalShard, decode: CausalShard) -> None:
    exported(prefill)
    batch = decode.batch(ask(get_tag(1), 1), ask(put_tag(5), 2))
    for _ in range(3):
        _, batch = decode.step(batch)
        assert rows_of(batch) == {}
    assert (decode.report.imports, decode.report.exports) == ({"hit": 1}, {"ok": 1})


def test_a_batch_without_handles_carries_nothing(decode: CausalShard) -> None:
    batch = decode.batch(ask("", 1), ask("lora", 2))
    stock = type(batch)(batch.requests, [PROMPT, PROMPT], decode.tokens)
    assert set(vars(batch)) == set(vars(stock))


@pytest.mark.parametrize(
    ("sent", "kept", "cleared"),
    [(put_tag(1, "lora"), "lora", False), (get_tag(1), "", True), ("lora|kv9:put:x", "lora", False)],
)
def test_the_real_adapter_is_put_back(decode: CausalShard, sent: str, kept: str, cleared: bool) -> None:
    arriving = ask(sent)
    decode.batch(arriving)
    assert (arriving.adapter_id, arriving.cleared) == (kept, cleared)


# --- warmup and faults ---


def test_before_warmup_is_over_handles_mean_nothing(host: Host, prefill: CausalShard) -> None:
    exported(prefill)
    shard = CausalShard(host, "d", bias=DECODE_BIAS, armed=False)
    assert tokens(shard.prefill(ask(get_tag(1, first=25), 1), ask(put_tag(2), 2))) == {1: OWN, 2: OWN}
    shard.arm()
    assert tokens(shard.prefill(ask(get_tag(1, first=SUM)))) == {1: SUM}


def test_warmup_shows_the_shape_of_the_cache(prefill: CausalShard) -> None:
    """2 layers of K and V with 2 heads of 4 values in 4 bytes; it grows with the requests."""
    shape = prefill.hooks.arm(prefill.model)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (2, 2, 4, "float32")
    assert (shape.bytes_per_token, shape.tokens) == (128, 0)


def test_a_cache_that_no_forward_has_shown_is_refused(host: Host) -> None:
    shard = CausalShard(host, "p", armed=False)
    with pytest.raises(BridgeMiss, match="layout: the model's cache has an unknown form"):
        shard.hooks.arm(shard.model)


@pytest.mark.parametrize(
    "pairs",
    [
        [(torch.zeros(2, 5, 4), torch.zeros(2, 5, 4))],
        [(torch.zeros(1, 2, 4, 5), torch.zeros(1, 2, 5, 4))],
        [(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4).half())],
        [
            (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)),
            (torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 4)),
        ],
    ],
    ids=["three dimensions", "keys turned", "two dtypes", "layers differ"],
)
def test_a_cache_of_another_form_is_refused(host: Host, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = CausalShard(host, "p", legacy=True, armed=False)
    answer = (torch.zeros(1, 1, VOCAB), None, pairs)
    monkeypatch.setattr(shard.model, "compute", lambda *args: answer)
    shard.model.forward(torch.zeros(1, 5), None, torch.zeros(1, 5))
    with pytest.raises(BridgeMiss, match="layout: the model's cache has an unknown form"):
        shard.hooks.arm(shard.model)


class Raising(MemoryBridge):
    def export(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise KeyError("anything")

    def lookup(self, *args: Any) -> NoReturn:
        raise MemoryError


def test_whatever_a_bridge_raises_the_answer_is_stocks(host: Host) -> None:
    def open_raising(shard: str, fingerprint: Fingerprint, ring_bytes: int) -> Bridge:
        return Raising(host.memory, shard, 3, fingerprint, ring_bytes, 60.0)

    host.bridge = open_raising
    shard = CausalShard(host, "p")
    assert tokens(shard.prefill(ask(put_tag(1), 1), ask(get_tag(1), 2))) == {1: SUM, 2: SUM}
    assert (shard.report.exports, shard.report.imports) == ({"error": 1}, {"error": 1})


def test_caches_that_cannot_be_joined_cost_a_prefill(
    prefill: CausalShard, decode: CausalShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are in memory already, so the first tokens are theirs all the same."""

    def refuse(*args: Any) -> NoReturn:
        raise MemoryError

    exported(prefill)
    monkeypatch.setattr(padded, "joined", refuse)
    answered = tokens(decode.prefill(ask(get_tag(1, first=SUM), 1), ask("", 2, token_ids=SHORT)))
    assert answered == {1: SUM, 2: 4 + DECODE_BIAS}
    assert decode.model.tokens_computed == [5]
    assert decode.report.faults == 1


def test_a_cache_that_cannot_be_read_is_no_record(
    prefill: CausalShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> NoReturn:
        raise IndexError("too few dimensions")

    monkeypatch.setattr(padded, "outbox", refuse)
    assert tokens(prefill.prefill(ask(put_tag(1)))) == {1: SUM}
    assert prefill.report.exports == {"error": 1}


def test_a_first_token_outside_the_vocabulary_is_not_forced(decode: CausalShard) -> None:
    assert tokens(decode.prefill(ask(get_tag(1, first=VOCAB)))) == {1: OWN}
    assert decode.report.faults == 1


def test_a_step_that_fails_raises_as_in_stock_and_leaves_nothing_behind(
    prefill: CausalShard, decode: CausalShard
) -> None:
    exported(prefill)
    batch = decode.batch(ask(get_tag(1)))
    decode.model.fails = True
    with pytest.raises(RuntimeError, match="the device has no memory left"):
        decode.step(batch)
    decode.model.fails = False
    assert tokens(decode.prefill(ask("", 2))) == {2: OWN}
    assert decode.report.faults == 0


def test_others_that_end_in_the_first_step_are_not_run_again(
    prefill: CausalShard, decode: CausalShard
) -> None:
    exported(prefill)
    ends_at_once = ask("", 2, token_ids=[1, 2], max_new_tokens=1)
    generations, batch = decode.step(decode.batch(ask(get_tag(1), 1), ends_at_once))
    assert set(tokens(generations)) == {1, 2}
    generations, _ = decode.step(batch)
    assert set(tokens(generations)) == {1}


def test_a_split_batch_is_cut_at_the_limit_of_the_whole(prefill: CausalShard, decode: CausalShard) -> None:
    """TGI cuts every prompt at the largest `truncate` of its batch: here at 100, so not at all."""
    longer = [9, 9, 9, *PROMPT]
    prefill.prefill(ask(put_tag(1), 1, token_ids=longer, truncate=5), ask("", 2, truncate=100))
    cut = ask(get_tag(1), 1, token_ids=longer, truncate=5)
    batch = decode.batch(cut, ask("", 2, truncate=100))
    assert batch.past_key_values[0][0].shape[2] == len(longer) - 1
    assert batch.input_lengths == [len(longer)]


def test_a_handle_with_an_absurd_number_costs_its_own_request_only(
    prefill: CausalShard, decode: CausalShard
) -> None:
    exported(prefill)
    absurd = ask(f"lora|kv1:get:p.{'9' * 5000}:{handle(4)}:-", 2, token_ids=SHORT)
    other = ask("blue|kv1:get:nonsense", 3, token_ids=SHORT)
    generations, _ = decode.step(decode.batch(absurd, ask(get_tag(1), 1), other))
    assert set(tokens(generations)) == {1, 2, 3}
    assert decode.report.imports == {"hit": 1}
    assert (absurd.adapter_id, other.adapter_id) == ("lora", "blue")
