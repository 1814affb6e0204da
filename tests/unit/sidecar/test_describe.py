"""A shard's status out of its ranks' reports: sums over ranks, counts of records, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sidecar.ranks import EPOCH, RING_BYTES, fingerprint, report, spec_in
from tgi_patches.contract import Limits, Role, StatusReply
from tgi_patches.report import Report, report_path, write_report
from tgi_patches.sidecar.describe import Reach, Reports, RouterView, limits_of, merged, status_of

TWO = spec_in(Path("/arenas"), ranks=2)
REACH = Reach("a" * 32, pull_port=7001, pull_host="10.1.0.2", pulls=True)
SERVING = RouterView(
    fault="", limits=Limits(80, 90, 8, max_best_of=3), running=4, waiting=2, kv_tokens_used=50
)


def status(reports: Sequence[Report | None], router: RouterView = SERVING, spec: Any = TWO) -> StatusReply:
    return status_of(spec, EPOCH, reports, router, REACH)


def test_a_shard_whose_ranks_all_flow() -> None:
    found = status([report(0, 2), report(1, 2, kv_tokens=900, bytes_per_token=48)])
    assert (found.hooked, found.note) == (True, "")
    assert (found.deployment, found.shard, found.role, found.epoch) == ("dep", "p0", Role.PREFILL, EPOCH)
    assert found.fingerprint == fingerprint(2)
    assert found.kv_tokens == 900  # the smallest cache ends first
    assert found.bytes_per_token == 80  # a token's KV lies on both
    assert (found.ring_bytes, found.record_limit_bytes) == (2 * RING_BYTES, RING_BYTES // 2)
    assert (found.running, found.waiting, found.slots, found.kv_tokens_used) == (4, 2, 8, 50)
    assert (found.arena_id, found.pull_port, found.pulls) == ("a" * 32, 7001, True)
    assert found.pull_host == "10.1.0.2"


def test_the_smallest_ring_bounds_a_record() -> None:
    found = status([report(0, 2), report(1, 2, ring_bytes=4096, record_limit_bytes=1024)])
    assert (found.ring_bytes, found.record_limit_bytes) == (8192, 2048)


def test_the_pinned_regions_of_all_ranks_are_told_and_none_of_a_shard_whose_records_do_not_flow() -> None:
    found = status([report(0, 2, pinned_bytes=8192), report(1, 2, pinned_bytes=4096)])
    assert found.pinned_bytes == 8192
    assert status([report(0, 2, pinned_bytes=8192), None]).pinned_bytes == 0
    assert status([report(0, 2), report(1, 2)]).pinned_bytes == 0


def test_limits_are_the_router_s_once_it_has_told_them() -> None:
    reports = [report(0, 2), report(1, 2)]
    assert status(reports).limits == Limits(80, 90, 8, max_best_of=3)
    assert status(reports, RouterView()).limits == Limits(90, 100, 8) == limits_of(TWO)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (None, "The server of rank 1 has not reported: it is starting, or runs without the overlay."),
        ({"epoch": EPOCH - 1}, "The report of rank 1 is of another incarnation of this shard."),
        ({"shard": "p1"}, "The report of rank 1 is of another incarnation of this shard."),
        ({"rank": 0}, "The report of rank 1 is of another incarnation of this shard."),
        ({"hooked": False, "note": "It is another TGI."}, "It is another TGI."),
        ({"hooked": False}, "The overlay of rank 1 gave no reason for being off."),
        ({"armed": False}, "The server of rank 1 has not finished its warmup."),
        ({"fingerprint": None}, "The server of rank 1 has not finished its warmup."),
        ({"world_size": 4}, "The server runs on 4 ranks, not on 2."),
        (
            {"fingerprint": replace(fingerprint(2), kv_dtype="uint8")},
            "The ranks of this shard differ in what they serve.",
        ),
    ],
)
def test_one_rank_that_does_not_flow_is_why_the_shard_does_not(
    second: dict[str, Any] | None, why: str
) -> None:
    found = status([report(0, 2), None if second is None else replace(report(1, 2), **second)])
    assert (found.hooked, found.note) == (False, why)
    assert (found.ring_bytes, found.record_limit_bytes) == (0, 0)


def test_a_shard_of_which_nothing_is_known_yet_can_be_described() -> None:
    spec = replace(TWO, kv_pool_tokens=500, dtype="bfloat16", revision="main")
    found = status([None, None], RouterView(), spec)
    assert not found.hooked
    assert (found.kv_tokens, found.bytes_per_token, found.exports) == (500, 0, {})
    announced = found.fingerprint
    assert (announced.model, announced.revision, announced.dtype) == ("m", "main", "bfloat16")
    assert announced.tensor_parallel == 2


@pytest.mark.parametrize(
    ("ordered", "tokens"),
    [
        ({"kv_pool_tokens": 500}, 500),
        ({}, 16_000),
        ({"max_batch_prefill_tokens": 20_000}, 20_000),
        ({"max_total_tokens": 30_000}, 30_000),
    ],
)
def test_a_cache_that_grows_with_its_requests_is_as_large_as_tgi_s_router_takes_it(
    ordered: dict[str, int], tokens: int
) -> None:
    growing = [report(0, 2, kv_tokens=0), report(1, 2, kv_tokens=0)]
    assert status(growing, spec=replace(TWO, **ordered)).kv_tokens == tokens


def test_numbers_of_an_earlier_incarnation_are_not_told() -> None:
    old = {"epoch": EPOCH - 1, "exports": {"ok": 9}, "imported_tokens": 9, "relaunch": "old"}
    found = status([report(0, 2, **old), report(1, 2, **old)])
    assert (found.exports, found.imported_tokens, found.relaunch, found.bytes_per_token) == ({}, 0, "", 0)


def test_tokens_are_counted_once_and_not_for_every_rank() -> None:
    counted = {"imported_tokens": 70, "recomputed_tokens": 3}
    found = status([report(0, 2, **counted), report(1, 2, **counted)])
    assert (found.imported_tokens, found.recomputed_tokens) == (70, 3)


def test_any_rank_may_ask_for_a_relaunch() -> None:
    assert status([report(0, 2), report(1, 2, relaunch="a prefill failed")]).relaunch == "a prefill failed"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], {}),
        ([{"ok": 5, "layout": 1}], {"ok": 5, "layout": 1}),
        ([{"ok": 5}, {"ok": 5}], {"ok": 5}),
        ([{"ok": 5}, {"ok": 4, "error": 1}], {"ok": 4, "error": 1}),
        ([{"ok": 1}, {"error": 1}], {"error": 1}),
        ([{"ok": 2, "pinned": 3}, {"ok": 2, "pinned": 3}], {"ok": 2, "pinned": 3}),
        ([{"pinned": 3}, {"ok": 1, "pinned": 2}], {"ok": 1, "pinned": 2}),
        ([{"pinned": 1}, {"ok": 1}], {"ok": 1}),
        ([{"pinned": 2}, {"pinned": 1, "error": 1}], {"pinned": 1, "error": 1}),
        ([{"pinned": 2}], {"pinned": 2}),
        ([{"hit": 3, "missing": 2}, {"hit": 3, "ranks": 2}], {"hit": 3, "missing": 2, "ranks": 2}),
    ],
)
def test_counts_are_of_whole_records(ranks: list[dict[str, int]], expected: dict[str, int]) -> None:
    assert merged(ranks) == expected


def test_reports_are_read_anew_and_tell_what_the_arenas_hold(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, ranks=2)
    (tmp_path / "dep").mkdir()
    reports = Reports(spec, EPOCH)
    assert reports() == [None, None]
    assert reports.fingerprint() is None
    write_report(report_path(tmp_path, "dep", "p0", 0), report(0, 2))
    assert reports.fingerprint() is None
    write_report(report_path(tmp_path, "dep", "p0", 1), report(1, 2))
    assert reports() == [report(0, 2), report(1, 2)]
    assert reports.fingerprint() == fingerprint(2)
