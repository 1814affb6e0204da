"""The flash hooks over the device path, whose copies to the host happen only when a test lets them."""

from __future__ import annotations

import pytest

from tests.unit.device.bed import FakeRuntime, Log
from tests.unit.overlay_stand_ins.flash import FlashShard
from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tests.unit.overlay_stand_ins.messages import (
    DECODE_BIAS,
    FINGERPRINT,
    OTHER_SLOTS,
    OWN,
    PROMPT,
    SLOTS,
    SUM,
    WHOLE_KV,
    ask,
    get_tag,
    handle,
    pin_tag,
    put_tag,
    tokens,
)
from tgi_patches.contract import BridgeMiss
from tgi_patches.device.path import DevicePath
from tgi_patches.device.registration import Registrar
from tgi_patches.device.streams import StepStreams
from tgi_patches.hooks import flash


class Device:
    """One shard on a device of its own."""

    def __init__(self, host: Host, name: str, bias: int = 0, pinned_bytes: int = 0) -> None:
        self.streams = StepStreams()
        self.path = DevicePath(self.streams, Registrar(FakeRuntime(), Log()))
        self.shard = FlashShard(host, name, bias=bias, path=self.path, pinned_bytes=pinned_bytes)

    def copies(self) -> None:
        while self.streams.queued:
            self.streams.step()


def published(host: Host) -> bool:
    try:
        host.memory_bridge("reader", FINGERPRINT, 0).lookup("p", 3, handle(1))
    except BridgeMiss:
        return False
    return True


async def test_a_record_is_there_once_its_copy_has_ended_and_a_step_has_looked(host: Host) -> None:
    device = Device(host, "p")
    shard = device.shard
    (generation,), batch = shard.step(shard.batch(ask(put_tag(1), max_new_tokens=9)))
    assert generation.token_id == SUM
    assert not published(host)
    _, batch = shard.step(batch)
    assert not published(host), "the copy is still under way"
    device.copies()
    shard.step(batch)
    assert published(host)
    assert shard.report.exports == {"ok": 1}
    assert shard.report.faults == 0


async def test_what_the_next_request_writes_into_the_blocks_is_not_exported(host: Host) -> None:
    """The router gives the blocks away at once: the gather was queued before the step returned."""
    device = Device(host, "p")
    device.shard.prefill(ask(put_tag(1), max_new_tokens=1))
    device.shard.prefill(ask("", 2, token_ids=[9, 9, 9, 9, 9], slots=SLOTS))
    device.copies()
    device.shard.prefill(ask("", 3, slots=OTHER_SLOTS))
    decode = Device(host, "d", DECODE_BIAS)
    (generation,), _ = decode.shard.step(decode.shard.batch(ask(get_tag(1, first=SUM))))
    assert generation.token_id == SUM
    assert decode.shard.kv(SLOTS[:5]) == WHOLE_KV, "imported on a device, the last token put back"
    assert decode.shard.report.imports == {"hit": 1}


async def test_records_are_pinned_from_a_device_as_long_as_there_is_room(host: Host) -> None:
    """5 tokens of 128 bytes and what stands in front of them take 704: five of them fit into 4,096."""
    device = Device(host, "p", pinned_bytes=4096)
    for number in range(1, 7):
        device.shard.prefill(ask(pin_tag(number), max_new_tokens=1))
    assert not published(host)
    device.copies()
    device.shard.prefill(ask("", 9, slots=OTHER_SLOTS))
    assert device.shard.report.exports == {"pinned": 5, "ok": 1}
    reader = host.memory_bridge("reader", FINGERPRINT, 0)
    assert [reader.lookup("p", 3, handle(n)).place.pinned for n in range(1, 7)] == [True] * 5 + [False]


async def test_a_record_that_is_pinned_from_a_device_is_a_hit_after_a_turn_of_the_ring(host: Host) -> None:
    """The ring goes round while the record is being copied, too."""
    device = Device(host, "p", pinned_bytes=4096)
    device.shard.prefill(ask(pin_tag(1), max_new_tokens=1))
    for number in range(100, 250):
        device.shard.prefill(ask(put_tag(number), 2, max_new_tokens=1, slots=OTHER_SLOTS))
    device.copies()
    device.shard.prefill(ask("", 3, slots=OTHER_SLOTS))
    assert device.shard.report.exports == {"ok": 150, "pinned": 1}
    decode = Device(host, "d", DECODE_BIAS).shard
    answered = tokens(decode.prefill(ask(get_tag(1)), ask(get_tag(100), 2, slots=OTHER_SLOTS)))
    assert answered == {1: OWN, 2: OWN}
    assert decode.kv(SLOTS[:5]) == WHOLE_KV
    assert decode.report.imports == {"hit": 1, "overwritten": 1}


async def test_a_long_answer_resumes_on_a_device(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "PIECE_TOKENS", 3)
    decode = Device(host, "d").shard
    batch = decode.batch(ask(get_tag(1), slots=SLOTS, max_new_tokens=3))
    said = []
    while batch is not None:
        (generation,), batch = decode.step(batch)
        said.append(generation.token_id)
    arriving = ask(get_tag(1), token_ids=PROMPT + said, slots=[0, 1, 2, 3, 4, 5, 6, 7, 24, 25])
    answered = tokens(decode.prefill(arriving))
    assert arriving.cache_len == len(PROMPT + said) - 1
    stock = tokens(decode.prefill(ask("", token_ids=PROMPT + said, slots=[0, 1, 2, 3, 4, 5, 6, 7, 24, 25])))
    assert answered == stock
    assert decode.report.imports == {"missing": 1, "resumed": 1}


async def test_what_cannot_be_reserved_is_counted_and_told(host: Host) -> None:
    host.bridge = lambda shard, fingerprint, _: host.memory_bridge(shard, fingerprint, 512)
    device = Device(host, "p")
    device.shard.prefill(ask(put_tag(1), max_new_tokens=1))
    assert device.shard.report.exports == {"layout": 1}
    assert device.streams.queued == []
