"""What must never reach TGI: faults of the overlay, handles that mean nothing, a health probe."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from tests.unit.overlay_stand_ins.causal import CausalShard
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
    RING_BYTES,
    SLOTS,
    SUM,
    VOCAB,
    WHOLE_KV,
    Request,
    ask,
    get_tag,
    handle,
    put_tag,
    tokens,
)
from tgi_patches.bridge import ArenaError, Bridge
from tgi_patches.bridge.memory import MemoryBridge
from tgi_patches.contract import BridgeMiss, Fingerprint, MissReason
from tgi_patches.hooks import flash
from tgi_patches.hooks.overlay import HEALTH_REQUEST_ID
from tgi_patches.hooks.rows import rows_of

# --- adapters and handles ---


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize(
    ("sent", "kept", "cleared"),
    [
        (put_tag(1, "lora"), "lora", False),
        (put_tag(1), "", True),
        (get_tag(1, adapter="lora"), "lora", False),
        (get_tag(1), "", True),
        ("lora|kv1:put:short", "lora", False),
        ("lora|kv9:put:" + handle(1), "lora", False),
        ("|kv", "", True),
        ("lora", "lora", False),
        ("", "", False),
    ],
)
def test_the_real_adapter_is_put_back(host: Host, armed: bool, sent: str, kept: str, cleared: bool) -> None:
    shard = FlashShard(host, "d", armed=armed)
    arriving = ask(sent)
    shard.batch(arriving)
    assert (arriving.adapter_id, arriving.cleared) == (kept, cleared)


@pytest.mark.parametrize(
    "broken", ["|kv1:put:short", f"|kv9:put:{handle(1)}", "|kv", f"|kv1:steal:{handle(1)}"]
)
def test_a_broken_handle_is_counted_and_served_as_stock(broken: str, decode: FlashShard) -> None:
    batch = decode.batch(ask(broken))
    assert rows_of(batch) == {}
    assert tokens(decode.step(batch)[0]) == {1: OWN}
    report = decode.report
    assert (report.faults, report.imports, report.exports) == (1, {}, {})


@pytest.mark.parametrize("tag", [put_tag(1), get_tag(1, first=25)])
def test_the_routers_health_probe_is_left_alone(tag: str, prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    probe = ask(tag, HEALTH_REQUEST_ID)
    batch = decode.batch(probe)
    assert (rows_of(batch), probe.adapter_id, probe.cache_len) == ({}, "", 0)
    assert tokens(decode.step(batch)[0]) == {HEALTH_REQUEST_ID: OWN}
    assert (decode.report.imports, decode.report.exports) == ({}, {})


@pytest.mark.parametrize("tag", [put_tag(1), get_tag(1, first=25)])
def test_before_warmup_is_over_handles_mean_nothing(tag: str, host: Host, prefill: FlashShard) -> None:
    exported(prefill)
    shard = FlashShard(host, "d", bias=DECODE_BIAS, armed=False)
    arriving = ask(tag)
    batch = shard.batch(arriving)
    assert (rows_of(batch), arriving.cache_len) == ({}, 0)
    assert tokens(shard.step(batch)[0]) == {1: OWN}
    shard.arm()
    assert tokens(shard.prefill(ask(get_tag(1, first=SUM)))) == {1: SUM}


# --- faults of the overlay's own ---


class Raising(MemoryBridge):
    """Every verb raises `error`."""

    error: Exception

    def export(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.error

    def lookup(self, *args: Any) -> NoReturn:
        raise self.error


ERRORS = [
    (RuntimeError("anything"), "error"),
    (MemoryError(), "error"),
    (KeyError("anything"), "error"),
    (BridgeMiss(MissReason.CHECKSUM), "checksum"),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_whatever_a_bridge_raises_the_answer_is_stocks(host: Host, error: Exception, reason: str) -> None:
    def open_raising(shard: str, fingerprint: Fingerprint, ring_bytes: int) -> Bridge:
        bridge = Raising(host.memory, shard, 3, fingerprint, ring_bytes, 60.0)
        bridge.error = error
        return bridge

    host.bridge = open_raising
    shard = FlashShard(host, "p")
    answered = shard.prefill(ask(put_tag(1), 1), ask(get_tag(1), 2, slots=OTHER_SLOTS))
    assert tokens(answered) == {1: SUM, 2: SUM}
    assert (shard.report.exports, shard.report.imports) == ({reason: 1}, {reason: 1})


def test_a_cache_that_cannot_be_read_costs_a_prefill(
    prefill: FlashShard, decode: FlashShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise IndexError("too few dimensions")

    exported(prefill)
    monkeypatch.setattr(flash, "StagedPool", refuse)
    arriving = ask(get_tag(1))
    answered = tokens(decode.prefill(arriving, ask(put_tag(5), 2, slots=OTHER_SLOTS)))
    assert answered == {1: OWN, 2: OWN}
    assert arriving.cache_len == 0
    assert (decode.report.imports, decode.report.exports) == ({"error": 1}, {"error": 1})


@pytest.mark.parametrize("name", ["prompt_lengths", "prefilling_mask", "all_input_ids", "cache_lengths"])
def test_a_batch_without_what_the_hooks_read_is_run_and_counted(name: str, prefill: FlashShard) -> None:
    batch = prefill.batch(ask(put_tag(1)))
    batch.update = lambda: None
    delattr(batch, name)
    assert tokens(prefill.step(batch)[0]) == {1: SUM}
    assert (prefill.report.faults, prefill.report.exports) == (1, {})


def test_rows_that_cannot_be_placed_are_run_and_counted(prefill: FlashShard) -> None:
    batch = prefill.batch(ask(put_tag(1)))
    batch.prefilling_mask = []
    assert tokens(prefill.step(batch)[0]) == {1: SUM}
    assert (prefill.report.faults, prefill.report.exports) == (1, {})


def test_a_first_token_outside_the_vocabulary_is_not_forced(decode: FlashShard) -> None:
    assert tokens(decode.prefill(ask(get_tag(1, first=VOCAB)))) == {1: OWN}
    assert decode.report.faults == 1


def test_a_request_message_of_another_form_is_served_and_counted(decode: FlashShard) -> None:
    arriving = ask("")
    arriving.adapter_id = None  # type: ignore[assignment]
    assert tokens(decode.prefill(arriving)) == {1: OWN}
    assert decode.report.faults == 1


def test_a_fault_costs_its_own_request_only(prefill: FlashShard, decode: FlashShard) -> None:
    """Between a hit and a put with an adapter stands a request that cannot be looked at."""
    exported(prefill)
    hit, broken = ask(get_tag(1, first=SUM), 1), ask("", 2, slots=OTHER_SLOTS)
    put = ask(put_tag(5, "lora"), 3, slots=[24, 25, 26, 27, 28])
    broken.adapter_id = None  # type: ignore[assignment]
    assert tokens(decode.prefill(hit, broken, put)) == {1: SUM, 2: OWN, 3: OWN}
    assert decode.kv(SLOTS[:5]) == WHOLE_KV
    assert put.adapter_id == "lora"
    report = decode.report
    assert (report.faults, report.imports, report.exports) == (1, {"hit": 1}, {"ok": 1})


class FailsOnce(Request):
    """Cannot tell the overlay whether it has a chunk length; TGI it can."""

    asked = False

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        if not self.asked:
            self.asked = True
            raise ValueError("no such field")
        return super().HasField(name)


def test_an_import_is_repaired_whatever_fails_after_it(prefill: FlashShard, decode: FlashShard) -> None:
    exported(prefill)
    arriving = FailsOnce(1, list(PROMPT), get_tag(1, first=SUM), SLOTS)
    assert tokens(decode.prefill(arriving)) == {1: SUM}
    assert decode.kv(SLOTS[:5]) == WHOLE_KV
    assert decode.model.tokens_computed == 1
    assert (decode.report.faults, decode.report.imports) == (1, {"hit": 1})


def test_a_put_whose_token_was_not_seen_is_no_record(prefill: FlashShard) -> None:
    batch = prefill.batch(ask(put_tag(1)))
    plain = batch.next_token_chooser
    batch.next_token_chooser = lambda *args: type(plain)()(*args)
    assert tokens(prefill.step(batch)[0]) == {1: SUM}
    assert prefill.report.exports == {"error": 1}


def test_an_arena_that_cannot_be_opened_leaves_a_stock_server(host: Host) -> None:
    def refuse(*args: Any) -> NoReturn:
        raise ArenaError("The arena has no room.")

    host.bridge = refuse
    shard = FlashShard(host, "p")
    assert not shard.overlay.armed
    arriving = ask(get_tag(1, adapter="lora"))
    assert tokens(shard.prefill(arriving)) == {1: SUM}
    assert (arriving.adapter_id, arriving.cache_len) == ("lora", 0)
    report = shard.report
    assert (report.hooked, report.armed, report.note) == (False, False, "The arena has no room.")


def test_an_armed_overlay_reports_what_it_serves(prefill: FlashShard) -> None:
    """8 blocks of 4 tokens; 2 layers of K and V with 2 heads of 4 values in 4 bytes."""
    report = prefill.report
    assert (report.hooked, report.armed, report.fingerprint) == (True, True, FINGERPRINT)
    assert (report.kv_tokens, report.bytes_per_token) == (32, 128)
    assert (report.ring_bytes, report.record_limit_bytes) == (RING_BYTES, RING_BYTES // 4)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_cache_with_its_heads_elsewhere_is_refused(host: Host, heads_first: bool) -> None:
    shard = FlashShard(host, "p", heads_first=heads_first, armed=False)
    shard.model.heads_first = not heads_first
    shard.model.new_cache()
    with pytest.raises(BridgeMiss, match="layout: a KV cache of shape"):
        shard.hooks.arm(shard.model)


def test_nobody_waits_for_a_put_leg_whose_step_failed(host: Host) -> None:
    """A letter to the sidecar, and a count; in both kinds of model."""
    for shard in (FlashShard(host, "f"), CausalShard(host, "c")):
        batch = shard.batch(ask(put_tag(1)), ask(get_tag(2), 2, slots=OTHER_SLOTS))
        shard.model.fails = True
        with pytest.raises(RuntimeError, match="no memory left"):
            shard.step(batch)
        assert shard.report.exports == {"error": 1}
        assert shard.report.faults == 0
