"""The flash hooks around stand-ins for TGI's classes: KV and first tokens go where they belong.

A decode shard's own choice is another one than the prefill shard's (`bias`), so a first token tells
where it came from.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.overlay_stand_ins.flash import FlashShard, exported
from tests.unit.overlay_stand_ins.flash import decode as decode
from tests.unit.overlay_stand_ins.flash import prefill as prefill
from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tests.unit.overlay_stand_ins.messages import (
    DECODE_BIAS,
    FINGERPRINT,
    OTHER_SLOTS,
    OWN,
    PROMPT,
    ROUNDING,
    SLOTS,
    SUM,
    VOCAB,
    WHOLE_KV,
    Request,
    ask,
    expected_logprob,
    get_tag,
    handle,
    pin_tag,
    put_tag,
    tokens,
)
from tests.unit.overlay_stand_ins.tokens import EOS, LENGTH, STOP
from tgi_patches.hooks.rows import rows_of

# --- put and get ---


@pytest.mark.parametrize(
    ("put_heads_first", "get_heads_first"), [(False, False), (True, False), (False, True)]
)
def test_an_import_computes_one_token_and_leaves_the_exported_kv(
    host: Host, put_heads_first: bool, get_heads_first: bool
) -> None:
    exported(FlashShard(host, "p", heads_first=put_heads_first))
    decode = FlashShard(host, "d", bias=DECODE_BIAS, heads_first=get_heads_first)
    arriving = ask(get_tag(1, first=SUM), slots=[30, 31, 0, 1, 2, 3, 4, 5])
    (generation,), batch = decode.step(decode.batch(arriving))

    assert (arriving.cache_len, arriving.HasField("chunk_len")) == (4, False)
    assert decode.model.tokens_computed == 1
    assert decode.kv([30, 31, 0, 1, 2]) == WHOLE_KV
    assert (generation.token_id, generation.logprob) == (SUM, expected_logprob(bias=0))
    (following,), _ = decode.step(batch)
    assert following.token_id == (SUM + SUM + DECODE_BIAS) % VOCAB
    assert decode.report.imports == {"hit": 1}
    assert decode.report.faults == 0


def test_without_the_repair_the_last_slot_would_differ(prefill: FlashShard) -> None:
    """The stand-in shows what the repair is for: a token computed alone leaves other bits."""
    prefill.prefill(ask("", cache_len=0))
    prefill.model.at(1, 0, SLOTS[4]).zero_()
    prefill.prefill(ask("", cache_len=4))
    assert prefill.kv(SLOTS[:5])[2] == [103, 101, 104, 101, 105 + ROUNDING]


def test_a_set_chunk_length_becomes_one_token(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    arriving = ask(get_tag(1), chunk_len=3)
    decode.batch(arriving)
    assert (arriving.cache_len, arriving.chunk_len) == (4, 1)


def test_slots_that_the_router_calls_cached_are_not_written(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    decode.batch(ask(get_tag(1), cache_len=2))
    assert decode.kv(SLOTS[:5])[0] == [-9, -9, 4, 1, 5]


@pytest.mark.parametrize(
    ("token_ids", "tag", "reason"),
    [
        (PROMPT, get_tag(2), "missing"),
        (PROMPT, get_tag(1, shard="q"), "missing"),
        (PROMPT, f"|kv1:get:p.4:{handle(1)}:-", "epoch"),
        ([3, 1, 4, 1, 6], get_tag(1), "tokens_differ"),
    ],
)
def test_a_miss_is_a_stock_prefill(
    prefill: FlashShard, decode: FlashShard, token_ids: list[int], tag: str, reason: str
) -> None:
    exported(prefill)
    arriving = ask(tag, token_ids=token_ids, cache_len=0, chunk_len=5)
    answered = tokens(decode.prefill(arriving))
    assert (arriving.cache_len, arriving.chunk_len) == (0, 5)
    assert answered == {1: (sum(token_ids) + DECODE_BIAS) % VOCAB}
    assert decode.model.tokens_computed == 5
    assert decode.report.imports == {reason: 1}


def test_a_miss_begins_with_the_token_that_its_handle_names(decode: FlashShard) -> None:
    """Its logprob is this shard's own: that of a token that it did not choose."""
    (generation,), batch = decode.step(decode.batch(ask(get_tag(1, first=25))))
    assert generation.token_id == 25
    assert generation.logprob == pytest.approx(expected_logprob(DECODE_BIAS) - 9.0)
    (following,), _ = decode.step(batch)
    assert following.token_id == (SUM + 25 + DECODE_BIAS) % VOCAB


def test_top_tokens_of_a_hit_are_the_exported_ones(prefill: FlashShard, decode: FlashShard) -> None:
    prefill_top = prefill.prefill(ask(put_tag(1), top_n_tokens=3))[0].top
    (generation,), batch = decode.step(decode.batch(ask(get_tag(1, first=SUM), top_n_tokens=3)))
    assert generation.top == prefill_top
    assert generation.top[0][0] == SUM
    assert decode.step(batch)[0][0].top[0][0] == (SUM + SUM + DECODE_BIAS) % VOCAB


def test_a_record_keeps_eleven_top_tokens_and_longer_lists_are_the_get_servers_own(
    prefill: FlashShard, decode: FlashShard
) -> None:
    """Eleven fit; a list of twelve is not cut, as TGI would not cut it."""
    for number, length in ((1, 11), (2, 12)):
        prefill.prefill(ask(put_tag(number), number, top_n_tokens=length))
        top = decode.prefill(ask(get_tag(number, first=SUM), number, top_n_tokens=length))[0].top
        assert len(top) == length
        assert (top[0][0] == OWN) == (length == 12)


def test_top_tokens_that_nobody_exported_are_this_shards(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    assert decode.prefill(ask(get_tag(1), top_n_tokens=2))[0].top[0][0] == OWN


def test_a_hit_whose_handle_names_no_token_begins_with_its_own(host: Host) -> None:
    """A reader of another request's record: the KV is that one's, the choice its own."""
    prefill, decode = FlashShard(host, "p"), FlashShard(host, "d", bias=DECODE_BIAS)
    sent = prefill.prefill(ask(put_tag(1), top_n_tokens=3))[0]
    arriving = ask(get_tag(1), top_n_tokens=3)
    (generation,), batch = decode.step(decode.batch(arriving))
    assert (arriving.cache_len, decode.model.tokens_computed) == (4, 1)
    assert decode.kv(SLOTS[:5]) == WHOLE_KV
    assert generation.token_id == OWN
    assert generation.logprob == pytest.approx(expected_logprob(DECODE_BIAS), rel=1e-3)
    assert generation.top[0] == (OWN, generation.logprob)
    assert generation.top != sent.top
    (following,), _ = decode.step(batch)
    assert following.token_id == (SUM + OWN + DECODE_BIAS) % VOCAB
    assert decode.report.imports == {"hit": 1}


def test_a_hit_whose_handle_names_another_token_than_the_record_begins_with_it(
    prefill: FlashShard, decode: FlashShard
) -> None:
    """The client has seen it; logprob and list are this shard's, as the record has none of it."""
    prefill.prefill(ask(put_tag(1), top_n_tokens=2))
    (generation,), _ = decode.step(decode.batch(ask(get_tag(1, first=25), top_n_tokens=2)))
    assert generation.token_id == 25
    assert generation.logprob == pytest.approx(expected_logprob(DECODE_BIAS) - 9.0)
    assert generation.top[0][0] == OWN


def test_readers_of_one_record_in_one_batch_each_begin_as_their_handles_say(
    prefill: FlashShard, decode: FlashShard
) -> None:
    exported(prefill)
    answered = decode.prefill(
        ask(get_tag(1), 1, slots=[0, 1, 2, 3, 4]),
        ask(get_tag(1, first=SUM), 2, slots=[5, 6, 7, 8, 9]),
        ask(get_tag(1), 3, slots=[10, 11, 12, 13, 14]),
    )
    assert tokens(answered) == {1: OWN, 2: SUM, 3: OWN}
    for slots in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]):
        assert decode.kv(slots) == WHOLE_KV
    assert decode.report.imports == {"hit": 3}


def test_requests_of_one_batch_each_get_their_own(prefill: FlashShard, decode: FlashShard) -> None:
    """A hit between a request without a handle and a miss."""
    exported(prefill)
    answered = decode.prefill(
        ask("", 1, slots=[0, 1, 2, 3, 4]),
        ask(get_tag(1, first=SUM), 2, slots=[5, 6, 7, 8, 9]),
        ask(get_tag(9), 3, slots=[10, 11, 12, 13, 14]),
    )
    own = OWN
    assert tokens(answered) == {1: own, 2: SUM, 3: own}
    assert decode.kv([5, 6, 7, 8, 9]) == WHOLE_KV
    assert decode.report.imports == {"hit": 1, "missing": 1}


def test_a_cache_that_was_made_anew_is_the_one_that_is_used(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    decode.prefill(ask(get_tag(1)))
    decode.model.new_cache()
    decode.prefill(ask(get_tag(1)))
    assert decode.kv(SLOTS[:5]) == WHOLE_KV


def test_prompt_logprobs_need_the_whole_prompt(host: Host, prefill: FlashShard) -> None:
    exported(prefill)
    asks = FlashShard(host, "d", request_logprobs=True)
    arriving = ask(get_tag(1), prefill_logprobs=True)
    asks.prefill(arriving)
    assert arriving.cache_len == 0
    assert asks.report.imports == {"unsupported": 1}
    never = FlashShard(host, "e")
    never.prefill(ask(get_tag(1), prefill_logprobs=True))
    assert never.report.imports == {"hit": 1}


def test_too_few_slots_are_a_layout_of_their_own(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    arriving = ask(get_tag(1), slots=SLOTS[:4])
    decode.batch(arriving)
    assert arriving.cache_len == 0
    assert decode.report.imports == {"layout": 1}


def test_results_of_imports_are_told_once(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    decode.batch(ask(get_tag(1), 7), ask(get_tag(2), 8), ask("", 9))
    assert json.loads(decode.overlay.take_results()) == {"7": "hit", "8": "missing"}
    assert decode.overlay.take_results() == ""


# --- pinned ---


def later_records(prefill: FlashShard) -> None:
    """More than the whole ring is written anew: 150 records of 700 bytes, in a ring of 64 KiB."""
    for number in range(100, 250):
        prefill.prefill(ask(put_tag(number), 2, max_new_tokens=1, slots=OTHER_SLOTS))


def test_a_pinned_record_is_a_hit_after_a_turn_of_the_ring_and_another_one_a_miss(
    host: Host, decode: FlashShard
) -> None:
    prefill = FlashShard(host, "p", pinned_bytes=4096)
    prefill.prefill(
        ask(pin_tag(1), max_new_tokens=1), ask(put_tag(2), 2, max_new_tokens=1, slots=OTHER_SLOTS)
    )
    assert prefill.report.exports == {"ok": 1, "pinned": 1}
    assert prefill.report.pinned_bytes == 4096
    later_records(prefill)
    decode.prefill(ask(get_tag(1), 1), ask(get_tag(2), 2, slots=OTHER_SLOTS))
    assert json.loads(decode.overlay.take_results()) == {"1": "hit", "2": "overwritten"}
    assert decode.kv(SLOTS[:5]) == WHOLE_KV


def test_a_shard_that_pins_nothing_exports_to_its_ring(prefill: FlashShard, decode: FlashShard) -> None:
    prefill.prefill(ask(pin_tag(1), max_new_tokens=1))
    assert (prefill.report.exports, prefill.report.pinned_bytes) == ({"ok": 1}, 0)
    assert tokens(decode.prefill(ask(get_tag(1, first=SUM)))) == {1: SUM}
    assert decode.report.imports == {"hit": 1}


# --- rows along the way ---


def long_put(chunk: int = 2) -> Request:
    return ask(put_tag(1), 1, chunk_len=chunk)


def test_a_chunked_prompt_is_exported_by_the_step_that_completes_it(
    prefill: FlashShard, decode: FlashShard
) -> None:
    prefill.model.chunk = 2
    batch = prefill.batch(long_put())
    for _ in range(2):
        generations, batch = prefill.step(batch)
        assert generations == []
        assert prefill.report.exports == {}
    generations, batch = prefill.step(batch)
    assert tokens(generations) == {1: SUM}
    assert prefill.report.exports == {"ok": 1}
    assert tokens(decode.prefill(ask(get_tag(1, first=SUM)))) == {1: SUM}


def test_rows_go_along_when_batches_are_joined_and_filtered(prefill: FlashShard) -> None:
    prefill.model.chunk = 2
    batch_class = prefill.module.FlashCausalLMBatch
    _, half_done = prefill.step(prefill.batch(long_put()))
    _, running = prefill.step(prefill.batch(ask("", 2, slots=OTHER_SLOTS)))
    joined = batch_class.concatenate([running, half_done])
    assert set(rows_of(joined)) == {1}
    _, joined = prefill.step(joined)
    kept = joined.filter([1])
    assert kept is not joined
    assert set(rows_of(kept)) == {1}
    prefill.step(kept)
    assert prefill.report.exports == {"ok": 1}


def test_rows_of_requests_that_were_filtered_out_are_forgotten(prefill: FlashShard) -> None:
    batch = prefill.batch(long_put(), ask(put_tag(2), 2, slots=OTHER_SLOTS, chunk_len=2))
    assert set(rows_of(batch)) == {1, 2}
    kept = batch.filter([2])
    assert set(rows_of(kept)) == {2}
    assert kept.filter([2]) is kept
    assert set(rows_of(kept)) == {2}


def test_a_row_is_dropped_with_its_first_token(prefill: FlashShard, decode: FlashShard) -> None:
    batch = prefill.batch(ask(put_tag(1)))
    for _ in range(3):
        _, batch = prefill.step(batch)
        assert rows_of(batch) == {}
    assert prefill.report.exports == {"ok": 1}
    batch = decode.batch(ask(get_tag(1)))
    for _ in range(3):
        _, batch = decode.step(batch)
        assert rows_of(batch) == {}
    assert decode.kv([SLOTS[4]]) == [[5], [5], [105], [205]]


def test_a_batch_without_handles_carries_nothing(prefill: FlashShard) -> None:
    batch = prefill.batch(ask(""))
    other = prefill.batch(ask("", 2))
    joined = prefill.module.FlashCausalLMBatch.concatenate([batch, other])
    stock = set(vars(prefill.module.FlashCausalLMBatch(batch.rows)))
    assert set(vars(batch)) == set(vars(joined)) == set(vars(joined.filter([2]))) == stock


def test_a_step_that_fails_raises_as_in_stock_and_leaves_nothing_behind(
    prefill: FlashShard, decode: FlashShard
) -> None:
    exported(prefill)
    batch = decode.batch(ask(get_tag(1)))
    decode.model.fails = True
    with pytest.raises(RuntimeError, match="the device has no memory left"):
        decode.step(batch)
    decode.model.fails = False
    generations, _ = decode.step(decode.batch(ask("", 2, slots=OTHER_SLOTS)))
    assert tokens(generations) == {2: OWN}
    assert decode.report.faults == 0


# --- the last token ---


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
    options: dict[str, Any], ended: bool, finish: str | None, host: Host, prefill: FlashShard
) -> None:
    """Token 14 is "o", the prompt's last one "f".  TGI alone would say `length` for all of one token."""
    (generation,) = prefill.prefill(ask(put_tag(1), **options))
    assert generation.finish == finish
    assert host.memory_bridge("reader", FINGERPRINT, 0).lookup("p", 3, handle(1)).ended is ended


def test_a_requests_limit_is_its_own_again_after_the_first_token(prefill: FlashShard) -> None:
    batch = prefill.batch(ask(put_tag(1), max_new_tokens=2))
    _, batch = prefill.step(batch)
    assert batch.stopping_criterias[0].max_new_tokens == 2
    (generation,), left = prefill.step(batch)
    assert (generation.finish, left) == (LENGTH, None)


@pytest.mark.parametrize("tag", ["", get_tag(1), get_tag(9)], ids=["none", "hit", "miss"])
def test_other_requests_end_as_in_stock(tag: str, prefill: FlashShard) -> None:
    """Beside a put leg in the same batch; of one token, so by length."""
    exported(prefill)
    asked = ask(tag, 1, max_new_tokens=1, eos_token_ids={SUM}, slots=OTHER_SLOTS)
    answered = prefill.prefill(asked, ask(put_tag(5), 2, max_new_tokens=1, eos_token_ids={SUM}))
    assert [generation.finish for generation in answered] == [LENGTH, EOS]
