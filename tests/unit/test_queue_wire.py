from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.ticket import (
    Choice,
    Completion,
    Grant,
    Leg,
    Outcome,
    Relayed,
    ShardView,
    Ticket,
    relayed,
)
from orchestrator.queues import calls, wire
from orchestrator.queues.scripts import Keys
from orchestrator.queues.table import Table, conservative, read_mode
from tgi_patches.contract import Fingerprint, Limits, Role

EPOCH = 1_764_435_392_123_456_789
"""Not a multiple of 256: as a double it would be another number."""

GRANT = Grant(
    handle="ab" * 16,
    choice=Choice.SEPARATED,
    reason="pair",
    decode=Leg("decode-0", EPOCH, "http://127.0.0.1:1"),
    prefill=Leg("prefill-0", EPOCH + 1, "http://127.0.0.1:2"),
    kv_tokens=160,
    record_bytes=1000,
    max_new_tokens=60,
)
VIEW = ShardView(
    shard="decode-0",
    role=Role.DECODE,
    epoch=EPOCH,
    url="http://127.0.0.1:1",
    state="ready",
    fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
    limits=Limits(100, 200),
    kv_tokens=1600,
    slots=5,
    ring_bytes=1000,
    record_limit_bytes=250,
    bytes_per_token=4,
)


def test_facts_survive_the_journey() -> None:
    ticket = Ticket("ab" * 16, "g.1", 10, 20, 1.5, 2.5, splittable=False, priority=3, model="m|kv")
    assert wire.ticket(wire.encode(ticket)) == ticket
    completion = Completion("ab" * 16, Outcome.DONE, {"prefill": 0.25}, 10, 20, imported=True)
    assert wire.completion(wire.encode(completion)) == completion
    assert wire.grant(wire.encode(GRANT)) == GRANT
    assert wire.answer(wire.encode(GRANT)) == GRANT
    pinned = replace(GRANT, pinned=True)
    assert wire.grant(wire.encode(pinned)) == pinned
    roomy = replace(VIEW, pinned_bytes=4096)
    assert wire.view(wire.encode(roomy), "ready") == roomy
    assert wire.view(wire.encode(VIEW), "ready") == VIEW
    assert wire.mode(wire.encode(Mode(2, 64))) == Mode(2, 64)
    refusal = wire.Refusal("ab" * 16, Refuse("too_large", "Too | large."))
    assert wire.answer(wire.encode(refusal)) == refusal


def test_an_imported_record_survives_the_journey_and_one_of_before_is_still_read() -> None:
    relayed = Relayed("ab" * 16, first_token_s=1.5, prefill_s=0.25, relay_s=0.125, prompt_tokens=9)
    assert wire.completion(wire.encode(relayed)) == relayed
    assert wire.completion(f'{{"handle":"{"ab" * 16}","newer":1}}') == Relayed("ab" * 16, 0.0, 0.0, 0.0, 0)
    for broken in ('{"first_token_s":1.5}', "{}", "[]"):
        with pytest.raises(wire.WireError):
            wire.completion(broken)


def test_what_redis_hears_of_an_imported_record_is_what_was_said_and_what_is_held_from_now_on() -> None:
    said = Relayed(GRANT.handle, first_token_s=1.5, prompt_tokens=9)
    held = relayed(GRANT)
    call = calls.relayed(Keys("one"), "g.1", held, said)
    handle, lease, told = map(str, call.args)
    assert handle == GRANT.handle
    assert wire.leased(lease) == held
    assert lease.startswith(f"160|0|decode-0.{EPOCH}||{{")
    assert wire.completion(told) == said


def test_predictions_survive_the_journey_under_the_names_of_their_choices() -> None:
    grant = replace(GRANT, predicted={Choice.SEPARATED: 1.25, Choice.MIXED: 2.5})
    assert wire.leased(wire.lease(grant)).predicted == {"separated": 1.25, "mixed": 2.5}


def test_a_lease_names_what_it_holds_before_the_grant() -> None:
    text = wire.lease(GRANT)
    assert text.startswith(f"160|1000|decode-0.{EPOCH}|prefill-0.{EPOCH + 1}|{{")
    assert wire.leased(text) == GRANT


def test_a_grant_of_before_there_were_pulls_is_still_read() -> None:
    text = wire.encode(GRANT).replace(',"pull":""', "").replace(',"sidecar_url":""', "")
    assert "pull" not in text
    assert "sidecar" not in text
    assert wire.grant(text) == GRANT
    pulled = replace(GRANT, pull="10.0.0.2:3101")
    assert wire.leased(wire.lease(pulled)) == pulled


def test_fields_of_a_newer_version_are_ignored_and_missing_ones_are_an_error() -> None:
    text = wire.encode(GRANT).replace('"kv_tokens"', '"new":1,"kv_tokens"')
    assert wire.grant(text) == GRANT
    for broken in ("", "{", "[]", "null", "{}", wire.encode(GRANT).replace('"decode"', '"x"')):
        with pytest.raises(wire.WireError, match="cannot be read"):
            wire.grant(broken)


def test_an_unreadable_mode_is_the_normal_mode() -> None:
    assert read_mode("{broken") == Mode()
    assert read_mode("") == Mode()


def test_every_key_belongs_to_its_deployment() -> None:
    keys = Keys("one")
    names = [
        *(keys.schema, keys.born, keys.leader, keys.fence, keys.mode, keys.tickets, keys.completions),
        *(keys.shards, keys.reserved, keys.gateways, keys.shard("s"), keys.gateway("g")),
        *(keys.queued("g"), keys.leases("g"), keys.grants("g")),
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith("orch:{one}:") for name in names)


def rows(leader: str, *views: ShardView) -> list[object]:
    counters = [f"decode-0.{EPOCH}|kv", "160", f"decode-0.{EPOCH}|slots", "1", "decode-0.5|kv", "999"]
    table: list[object] = [leader, "", 2, 7, counters]
    for view in views:
        table += [view.shard, view.state, wire.encode(view), ""]
    return table


def test_a_table_books_what_is_reserved_on_the_present_incarnation_only() -> None:
    table = Table.parse(rows("c.1:1", VIEW))
    assert (table.leader, table.gateways, table.waiting) == ("c.1:1", 2, 7)
    (view,) = table.shards
    assert (view.reserved_kv_tokens, view.reserved_slots, view.outstanding_bytes) == (160, 1, 0)


def test_shards_that_lapsed_are_kept_while_nobody_leads_and_dropped_when_a_leader_removed_them() -> None:
    last = Table.parse(rows("c.1:1", VIEW))
    assert [view.shard for view in Table.parse(rows(""), last).shards] == ["decode-0"]
    other = replace(VIEW, shard="decode-1")
    assert [view.shard for view in Table.parse(rows("c.1:1", other), last).shards] == ["decode-1"]


def test_a_new_leader_that_has_published_nothing_yet_takes_no_shard_away() -> None:
    last = Table.parse(rows("c.1:1", VIEW))
    assert [(view.shard, view.state) for view in Table.parse(rows("c.2:2"), last).shards] == [
        ("decode-0", "ready")
    ]


def test_a_shard_that_a_new_leader_has_not_asked_yet_is_kept_and_gets_nothing_new() -> None:
    last = Table.parse(rows("c.1:1", VIEW))
    unknown = ["decode-0", "starting", "", ""]
    (view,) = Table.parse([*rows("c.2:2"), *unknown], last).shards
    assert (view.shard, view.state, view.kv_tokens) == ("decode-0", "starting", VIEW.kv_tokens)


def test_problems_are_told_also_of_shards_that_never_answered() -> None:
    silent = ["prefill-0", "starting", "", "Shard prefill-0 is silent."]
    with capture_logs() as logged:
        table = Table.parse([*rows("c.1:1", VIEW), *silent])
    assert logged == []  # nothing to be read is nothing unreadable
    assert [view.shard for view in table.shards] == ["decode-0"]
    assert table.problems == ("Shard prefill-0 is silent.",)


def test_without_redis_two_gateways_share_half_of_everything_less_their_own_grants() -> None:
    table = Table.parse(rows("c.1:1", VIEW))
    (idle,) = conservative(table, [])
    assert (idle.kv_tokens, idle.slots, idle.ring_bytes, idle.reserved_kv_tokens) == (400, 1, 250, 0)
    assert idle.limits.max_concurrent_requests == 32
    (busy,) = conservative(table, [GRANT])
    assert (busy.reserved_kv_tokens, busy.reserved_slots) == (160, 1)


@pytest.mark.parametrize(
    "text",
    [
        '{"level":77,"output_cap":"z"}',
        '{"level":"a"}',
        '{"level":1.5}',
        '{"level":-5}',
        '{"level":true}',
        '{"output_cap":0}',
        '{"output_cap":-4}',
        '{"shed_below":"low"}',
        '{"auto":"no"}',
        '{"reason":5}',
        "[1]",
        "7",
    ],
)
def test_a_mode_that_nobody_could_have_set_is_the_normal_one(text: str) -> None:
    assert read_mode(text) == Mode()
