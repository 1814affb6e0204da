"""The cost book: what is known of a shard, of its kind, and after a restart."""

from __future__ import annotations

import asyncio
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.costbook import ENOUGH_SAMPLES, PROFILES_MOST, CostBook, profile
from orchestrator.core.ticket import Choice, Grant, Leg, Relayed, ShardView, Ticket
from orchestrator.costs import FILE_MOST_BYTES, CostFile
from tgi_patches.contract import Fingerprint, Limits, Role

PRINT = Fingerprint("m", "r", "t", "float32", "float32", layers=2, kv_heads=1, head_dim=8)
KNOWN = Costs(PrefillCost(0.01, 1e-4, 1e-8), DecodeCost(0.02, 1e-7, 1e-3), RelayCost(0.002, 1e9), None)


def view(shard: str = "p0", role: Role = Role.PREFILL, epoch: int = 1, **changes: Any) -> ShardView:
    return ShardView(
        shard=shard,
        role=role,
        epoch=epoch,
        url=f"http://{shard}",
        state="ready",
        fingerprint=replace(PRINT, **changes),
        limits=Limits(4000, 4096),
        kv_tokens=100_000,
        slots=64,
        ring_bytes=1 << 20,
        record_limit_bytes=1 << 18,
        bytes_per_token=10,
    )


def prefilled(
    book: CostBook, shard: str, epoch: int, count: int, *, seconds: float, at_s: float = 0.0
) -> None:
    """So many prompts of 100 tokens, one after the other, `seconds` each."""
    for i in range(count):
        handle, now_s = f"{shard}.{epoch}.{at_s}.{i}", at_s + i
        leg = Leg(shard, epoch, f"http://{shard}")
        decode = Leg("d0", 1, "http://d0")
        grant = Grant(handle, Choice.SEPARATED, "pair", decode, leg, 160, 1000, 50)
        book.granted(Ticket(handle, "g.1", 100, 50, now_s, now_s + 60), grant, now_s)
        book.relayed(Relayed(handle, 1e6 + now_s + seconds, seconds, 0.001, 100), now_s + seconds)
        book.of(view(shard, epoch=epoch))


def alone_s(book: CostBook, of: ShardView, tokens: int = 100) -> float:
    costs = book.of(of)
    assert costs is not None
    assert costs.prefill is not None
    return costs.prefill.alone_s(tokens)


def test_nothing_is_known_of_a_shard_before_it_was_measured() -> None:
    book = CostBook()
    assert book.of(view()) is None
    assert book.unknown(view())
    assert book.batches("p0") is None


def test_what_happens_is_learned() -> None:
    book = CostBook()
    book.of(view())
    prefilled(book, "p0", 1, 20, seconds=0.05)
    assert alone_s(book, view()) == pytest.approx(0.05, rel=0.02)
    assert book.batches("p0") == (pytest.approx(1.0), pytest.approx(100.0))
    assert book.unknown(view())  # nobody has decoded


def test_a_question_in_between_costs_no_fit_and_gives_the_same_object() -> None:
    book = CostBook()
    book.of(view())
    prefilled(book, "p0", 1, 20, seconds=0.05)
    assert book.of(view()) is book.of(view())


def test_a_relaunched_shard_begins_with_what_it_had_learned() -> None:
    book = CostBook()
    book.of(view())
    prefilled(book, "p0", 1, 20, seconds=0.05)
    book.lost("p0", 1)
    assert alone_s(book, view(epoch=2)) == pytest.approx(0.05, rel=0.02)
    assert book.batches("p0") is None  # of the present incarnation
    prefilled(book, "p0", 2, 60, seconds=0.20, at_s=100.0)
    assert alone_s(book, view(epoch=2)) == pytest.approx(0.20, rel=0.1)


def test_a_second_shard_of_the_same_kind_begins_with_what_the_first_has_shown_in_any_role() -> None:
    book = CostBook()
    book.of(view())
    prefilled(book, "p0", 1, ENOUGH_SAMPLES + 30, seconds=0.05)
    assert alone_s(book, view("m0", Role.MIXED)) == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"revision": "2"},
        {"dtype": "bfloat16"},
        {"quantization": "awq"},
        {"attention": "flashinfer"},
        {"tensor_parallel": 2},
    ],
)
def test_a_shard_of_another_kind_does_not(changes: dict[str, Any]) -> None:
    book = CostBook({profile(view()): KNOWN})
    assert book.of(view()) == KNOWN
    assert book.of(view("p1", **changes)) is None


def test_two_shards_of_a_kind_are_told_apart() -> None:
    book = CostBook()
    for shard in ("p0", "p1"):
        book.of(view(shard))
    prefilled(book, "p0", 1, 60, seconds=0.05)
    prefilled(book, "p1", 1, 60, seconds=0.20)
    assert alone_s(book, view("p0")) == pytest.approx(0.05, rel=0.1)
    assert alone_s(book, view("p1")) == pytest.approx(0.20, rel=0.1)


def test_a_calibration_is_known_at_once_and_for_the_kind() -> None:
    book = CostBook()
    book.calibrated(view(), Costs(KNOWN.prefill, KNOWN.decode))
    assert not book.unknown(view())
    assert book.of(view("d0", Role.DECODE)) == Costs(KNOWN.prefill, KNOWN.decode)
    assert book.changes == 1


def test_what_a_shard_does_not_do_itself_is_known_from_others_of_its_kind() -> None:
    book = CostBook()
    book.of(view())
    book.of(view("d0", Role.DECODE))
    prefilled(book, "p0", 1, ENOUGH_SAMPLES + 30, seconds=0.05)
    alone_s(book, view())
    found = book.of(view("d0", Role.DECODE))
    assert found is not None
    assert found.prefill is not None


def test_a_calibration_serves_the_others_of_its_kind_that_were_asked_for_before_it() -> None:
    book = CostBook()
    assert book.of(view("d0", Role.DECODE)) is None
    book.calibrated(view(), Costs(KNOWN.prefill, KNOWN.decode))
    assert book.of(view("d0", Role.DECODE)) == Costs(KNOWN.prefill, KNOWN.decode)


def test_a_calibration_does_not_take_away_what_it_cannot_measure() -> None:
    book = CostBook({profile(view()): KNOWN})
    slower = PrefillCost(0.5, 1e-4)
    book.calibrated(view(), Costs(slower, KNOWN.decode))
    assert book.of(view()) == Costs(slower, KNOWN.decode, KNOWN.relay, None)


def test_samples_of_an_incarnation_that_is_gone_change_nothing() -> None:
    book = CostBook({profile(view()): KNOWN})
    book.of(view(epoch=2))
    prefilled_at_once = CostBook.relayed  # the same events, for the older epoch
    leg, decode = Leg("p0", 1, "http://p0"), Leg("d0", 1, "http://d0")
    for i in range(40):
        grant = Grant(str(i), Choice.SEPARATED, "pair", decode, leg, 160, 1000, 50)
        book.granted(Ticket(str(i), "g.1", 100, 50, i, i + 60), grant, i)
        prefilled_at_once(book, Relayed(str(i), 1e6 + i + 9, 9.0, 0.001, 100), i + 9)
    assert book.of(view(epoch=2)) == KNOWN


# --- the file -----------------------------------------------------------------------------------


def test_a_book_survives_its_file(tmp_path: Path) -> None:
    book = CostBook({profile(view()): KNOWN})
    (tmp_path / "costs.json").write_bytes(orjson.dumps(book.to_dict()))
    again = CostFile(tmp_path / "costs.json").read()
    assert again.of(view("other", epoch=9)) == KNOWN
    assert again.to_dict() == book.to_dict()


def test_no_file_is_an_empty_book_without_a_word(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert CostFile(tmp_path / "none.json").read().to_dict()["profiles"] == {}
    assert logs == []


def one_profile(**changes: Any) -> bytes:
    prefill = {"fixed_s": 0.01, "per_token_s": 1e-4, "per_square_s": 0.0} | changes
    return orjson.dumps({"version": 1, "profiles": {profile(view()): {"prefill": prefill}}})


DAMAGED = {
    "half": one_profile()[:-10],
    "text": b"costs",
    "bytes": b"\xff\xfe\x00",
    "empty": b"",
    "list": b"[]",
    "no version": b'{"profiles": {}}',
    "next version": b'{"version": 2, "profiles": {}}',
    "profiles": b'{"version": 1, "profiles": []}',
    "profile": b'{"version": 1, "profiles": {"a": 5}}',
    "part": b'{"version": 1, "profiles": {"a": {"prefill": 5}}}',
    "missing": b'{"version": 1, "profiles": {"a": {"prefill": {"fixed_s": 0.1}}}}',
    "unknown": one_profile(colour=1),
    "negative": one_profile(per_token_s=-1e-4),
    "huge": one_profile(per_token_s=1e9),
    "overflow": b'{"version": 1, "profiles": {"a": {"relay": {"latency_s": 1e999, "bytes_per_s": 1}}}}',
    "nan": one_profile().replace(b"0.01", b"NaN"),
    "words": one_profile(fixed_s="0.01"),
    "null": one_profile(fixed_s=None),
    "too large": one_profile() + b" " * FILE_MOST_BYTES,
    "deep": b"[" * 100_000,
    "too many": orjson.dumps({"version": 1, "profiles": {str(i): {} for i in range(PROFILES_MOST + 1)}}),
}


def test_the_undamaged_file_of_these_tests_is_read(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(one_profile())
    assert CostFile(tmp_path / "costs.json").read().of(view()) == Costs(PrefillCost(0.01, 1e-4, 0.0))


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_foreign_file_is_an_empty_book_and_one_line_in_the_log(
    tmp_path: Path, damage: str
) -> None:
    (tmp_path / "costs.json").write_bytes(DAMAGED[damage])
    with capture_logs() as logs:
        book = CostFile(tmp_path / "costs.json").read()
    assert book.of(view()) is None
    assert [line["event"] for line in logs] == ["costs_not_read"]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["prefill", "decode", "relay", "pull", "fixed_s", "per_token_s", "per_square_s", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(json_values, st.sampled_from([1, 2, None]))
def test_whatever_a_file_says_only_numbers_that_can_be_true_are_used(raw: Any, version: Any) -> None:
    try:
        book = CostBook.from_dict({"version": version, "profiles": {profile(view()): raw}})
    except ValueError:
        return
    costs = book.of(view())
    if costs is not None and costs.prefill is not None:
        assert 0 <= costs.prefill.alone_s(1000) < math.inf


async def test_what_changed_is_written_in_one_step_and_again_at_the_end(tmp_path: Path) -> None:
    file, book = tmp_path / "costs.json", CostBook()
    keeping = asyncio.create_task(CostFile(file).keep(book, every_s=0.01))
    await asyncio.sleep(0.05)
    assert not file.exists()  # nothing was learned
    book.calibrated(view(), KNOWN)
    async with asyncio.timeout(10):
        while not file.exists():  # noqa: ASYNC110 - a file, no event to wait for
            await asyncio.sleep(0.01)
    assert CostFile(file).read().to_dict() == book.to_dict()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert not file.with_name("costs.json.new").exists()


async def test_the_last_word_is_kept_when_the_deployment_stops(tmp_path: Path) -> None:
    file, book = tmp_path / "costs.json", CostBook()
    keeping = asyncio.create_task(CostFile(file).keep(book, every_s=1000))
    await asyncio.sleep(0)
    book.calibrated(view(), KNOWN)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert CostFile(file).read().of(view()) == KNOWN


async def test_a_folder_that_cannot_be_written_is_said_once_and_hurts_nobody(tmp_path: Path) -> None:
    book = CostBook()
    file = CostFile(tmp_path / "missing" / "costs.json")
    with capture_logs() as logs:
        keeping = asyncio.create_task(file.keep(book, every_s=0.001))
        for _ in range(5):
            book.calibrated(view(), KNOWN)
            await asyncio.sleep(0.02)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert [line["event"] for line in logs] == ["costs_not_saved"]
