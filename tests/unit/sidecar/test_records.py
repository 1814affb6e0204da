"""A shard's own records from outside: there once every rank has published, and a counted miss otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sidecar.ranks import HANDLE, OTHER, TOKENS, Rank, fingerprint, spec_in
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason, ShardSpec
from tgi_patches.sidecar.records import Records


@pytest.fixture
def records(spec: ShardSpec) -> Iterator[Records]:
    with closing(Records(spec, 77, lambda: fingerprint(2))) as opened:
        yield opened


def reason_of(call: Callable[..., Any], *arguments: Any) -> MissReason:
    with pytest.raises(BridgeMiss) as miss:
        call(*arguments)
    return miss.value.reason


def test_a_record_is_there_once_every_rank_has_published(
    spec: ShardSpec, start: Callable[..., list[Rank]], records: Records
) -> None:
    zero, one = start(spec)
    assert reason_of(records.own_lookup, HANDLE) == MissReason.MISSING
    zero.export()
    assert reason_of(records.own_lookup, HANDLE) == MissReason.MISSING
    one.export()
    found = records.own_lookup(HANDLE)
    assert (found.token_ids, found.first.id, found.rank, found.ranks) == (TOKENS, 42, 0, 2)
    assert found.kv_bytes == 2 * 3 * 32  # ranks, tokens, bytes of K and V


def test_without_an_arena_or_before_the_warmup_it_is_missing(spec: ShardSpec, records: Records) -> None:
    assert reason_of(records.own_lookup, HANDLE) == MissReason.MISSING
    told: list[Fingerprint | None] = [None]
    waiting = Records(spec, 77, lambda: told[0])
    assert reason_of(waiting.own_lookup, HANDLE) == MissReason.MISSING
    waiting.close()


def test_the_warmup_may_end_while_we_wait(spec: ShardSpec, start: Callable[..., list[Rank]]) -> None:
    told: list[Fingerprint | None] = [None]
    with closing(Records(spec, 77, lambda: told[0])) as records:
        for rank in start(spec):
            rank.export()
        assert reason_of(records.own_lookup, HANDLE) == MissReason.MISSING
        told[0] = fingerprint(2)
        assert records.own_lookup(HANDLE).token_ids == TOKENS


def test_an_arena_of_another_epoch_is_not_ours(spec: ShardSpec, start: Callable[..., list[Rank]]) -> None:
    for rank in start(spec):
        rank.export()
    with closing(Records(spec, 78, lambda: fingerprint(2))) as later:
        assert reason_of(later.own_lookup, HANDLE) == MissReason.EPOCH


@pytest.mark.parametrize("changes", [{"tokens": (5, 6, 8)}, {"first": 43}], ids=["prompt", "first token"])
def test_ranks_that_published_different_things_under_one_handle_are_a_miss(
    spec: ShardSpec, start: Callable[..., list[Rank]], records: Records, changes: dict[str, Any]
) -> None:
    zero, one = start(spec)
    zero.export()
    one.export(**changes)
    assert reason_of(records.own_lookup, HANDLE) == MissReason.TOKENS_DIFFER


def test_a_shard_that_ran_on_other_ranks_than_ordered_is_a_miss(
    spec: ShardSpec, start: Callable[..., list[Rank]]
) -> None:
    start(spec)[0].export()
    alone = spec_in(Path(spec.arena_dir), ranks=1)
    with closing(Records(alone, 77, lambda: fingerprint(2))) as records:
        assert reason_of(records.own_lookup, HANDLE) == MissReason.LAYOUT


def test_a_record_of_one_handle_is_not_another_s(
    spec: ShardSpec, start: Callable[..., list[Rank]], records: Records
) -> None:
    for rank in start(spec):
        rank.export()
    assert reason_of(records.own_lookup, OTHER) == MissReason.MISSING


def test_what_was_closed_is_mapped_again(
    spec: ShardSpec, start: Callable[..., list[Rank]], records: Records
) -> None:
    for rank in start(spec):
        rank.export()
    first = records.own_lookup(HANDLE)
    records.close()
    assert records.own_lookup(HANDLE) == first
