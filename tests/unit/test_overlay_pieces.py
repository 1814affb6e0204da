"""Answers that TGI's router makes in pieces: the next one goes on from what the last one left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.overlay_stand_ins.causal import CausalShard
from tests.unit.overlay_stand_ins.flash import FlashShard, exported
from tests.unit.overlay_stand_ins.flash import decode as decode
from tests.unit.overlay_stand_ins.flash import prefill as prefill
from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tests.unit.overlay_stand_ins.messages import DECODE_BIAS, PROMPT, SUM, ask, get_tag, put_tag
from tgi_patches.hooks import flash
from tgi_patches.hooks.rows import rows_of

PIECE = 3
FIRST_SLOTS = [9, 10, 11, 12, 20, 21, 22, 23]
MORE_SLOTS = [0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "PIECE_TOKENS", PIECE)


def piece(shard: FlashShard, tag: str, prompt: list[int], slots: list[int], **options: Any) -> list[int]:
    """The tokens of one request for a whole piece."""
    batch = shard.batch(ask(tag, token_ids=prompt, slots=slots, max_new_tokens=PIECE, **options))
    said = []
    while batch is not None:
        (generation,), batch = shard.step(batch)
        said.append(generation.token_id)
    return said


def test_the_next_piece_computes_one_token_where_its_text_is_cut_the_same_way(
    prefill: FlashShard, decode: FlashShard
) -> None:
    exported(prefill)
    said = piece(decode, get_tag(1, first=SUM), PROMPT, FIRST_SLOTS)
    assert decode.report.exports == {"kept": 1}
    longer = PROMPT + said
    before = decode.model.tokens_computed
    going_on = piece(decode, get_tag(1, first=SUM), longer, MORE_SLOTS)
    assert decode.model.tokens_computed - before == PIECE, "one of the prompt, and all but the last answered"
    assert decode.report.imports == {"hit": 1, "resumed": 1}
    stock = piece(decode, "", longer, MORE_SLOTS)
    assert going_on == stock
    assert going_on[0] != SUM, "the token that began the whole answer is not said again"
    assert (decode.report.imported_tokens, decode.report.recomputed_tokens) == (4 + 7, 1 + 1)
    assert decode.report.faults == 0


def test_text_that_became_other_tokens_is_computed_from_there_on(
    prefill: FlashShard, decode: FlashShard
) -> None:
    exported(prefill)
    said = piece(decode, get_tag(1), PROMPT, FIRST_SLOTS)
    longer = [*PROMPT, said[0], 25, 24, 23]
    arriving = ask(get_tag(1), token_ids=longer, slots=MORE_SLOTS, max_new_tokens=PIECE, chunk_len=9)
    (generation,), _ = decode.step(decode.batch(arriving))
    assert (arriving.cache_len, arriving.chunk_len) == (6, 3)
    stock, _ = decode.step(decode.batch(ask("", token_ids=longer, slots=MORE_SLOTS, max_new_tokens=PIECE)))
    assert generation.token_id == stock[0].token_id
    assert decode.report.imports == {"hit": 1, "resumed": 1}


def test_a_chunk_that_the_router_made_smaller_stays_so(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    said = piece(decode, get_tag(1), PROMPT, FIRST_SLOTS)
    arriving = ask(get_tag(1), token_ids=[*PROMPT, said[0], 25, 24, 23], slots=MORE_SLOTS, chunk_len=2)
    decode.batch(arriving)
    assert (arriving.cache_len, arriving.chunk_len) == (6, 2)


def test_a_third_piece_goes_on_from_the_second(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    said = piece(decode, get_tag(1), PROMPT, FIRST_SLOTS)
    more = piece(decode, get_tag(1), PROMPT + said, MORE_SLOTS)
    arriving = ask(get_tag(1), token_ids=PROMPT + said + more, slots=list(range(16)))
    decode.batch(arriving)
    assert arriving.cache_len == len(PROMPT + said + more) - 1
    assert decode.report.exports == {"kept": 2}
    assert decode.report.imports == {"hit": 1, "resumed": 2}


def test_a_miss_is_kept_as_well(decode: FlashShard) -> None:
    said = piece(decode, get_tag(1, first=7), PROMPT, FIRST_SLOTS)
    assert said[0] == 7
    arriving = ask(get_tag(1, first=7), token_ids=PROMPT + said, slots=MORE_SLOTS)
    (generation,), _ = decode.step(decode.batch(arriving))
    assert decode.report.imports == {"missing": 1, "resumed": 1}
    stock, _ = decode.step(decode.batch(ask("", token_ids=PROMPT + said, slots=MORE_SLOTS)))
    assert generation.token_id == stock[0].token_id


@pytest.mark.parametrize("options", [{"eos_token_ids": set(range(26))}, {"max_new_tokens": 2}])
def test_an_answer_that_ends_by_itself_is_not_kept(
    options: dict[str, Any], prefill: FlashShard, decode: FlashShard
) -> None:
    exported(prefill)
    asked = {"max_new_tokens": PIECE} | options
    batch = decode.batch(ask(get_tag(1), **asked))
    while batch is not None:
        _, batch = decode.step(batch)
    assert decode.report.exports == {}


def test_rows_of_pieces_go_along_until_their_end(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    batch = decode.batch(ask(get_tag(1), 1, slots=FIRST_SLOTS, max_new_tokens=PIECE))
    other = decode.batch(ask("", 2, slots=MORE_SLOTS, max_new_tokens=9))
    _, batch = decode.step(batch)
    _, other = decode.step(other)
    joined = decode.module.FlashCausalLMBatch.concatenate([other, batch])
    assert set(rows_of(joined)) == {1}
    _, joined = decode.step(joined)
    _, joined = decode.step(joined)
    assert rows_of(joined) == {}
    assert decode.report.exports == {"kept": 1}


def test_a_second_try_of_the_same_prompt_is_no_continuation(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    piece(decode, get_tag(1, first=SUM), PROMPT, FIRST_SLOTS)
    assert piece(decode, get_tag(1, first=SUM), PROMPT, FIRST_SLOTS)[0] == SUM
    assert decode.report.imports == {"hit": 2}


def test_kv_that_cannot_be_kept_is_counted_and_the_answer_goes_on(host: Host, prefill: FlashShard) -> None:
    """A ring of 512 bytes takes no record of seven tokens of 128."""
    exported(prefill)
    host.bridge = lambda shard, fingerprint, _: host.memory_bridge(shard, fingerprint, 512)
    decode = FlashShard(host, "d", bias=DECODE_BIAS)
    said = piece(decode, get_tag(1), PROMPT, FIRST_SLOTS)
    assert decode.report.exports == {"layout": 1}
    assert piece(decode, get_tag(1), PROMPT + said, MORE_SLOTS) == piece(
        decode, "", PROMPT + said, MORE_SLOTS
    )
    assert decode.report.imports == {"hit": 1, "missing": 1}


def test_a_padded_model_goes_on_by_a_prefill_and_with_its_own_token(host: Host) -> None:
    shard = CausalShard(host, "c")
    shard.prefill(ask(put_tag(1), max_new_tokens=1))
    first = shard.prefill(ask(get_tag(1, first=5, shard="c"), 2))[0].token_id
    longer = [*PROMPT, first]
    going_on = shard.prefill(ask(get_tag(1, first=5, shard="c"), 3, token_ids=longer))[0].token_id
    assert going_on == shard.prefill(ask("", 4, token_ids=longer))[0].token_id
    assert shard.report.imports == {"hit": 1, "unsupported": 1}
