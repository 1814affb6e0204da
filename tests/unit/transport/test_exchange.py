"""Offers, answers and what is believed: givers and takers over communicators without a peer."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.transport.fakes import FakeCommunicator
from tgi_patches.contract import BridgeMiss, ContractError, MissReason
from tgi_patches.transport.exchange import (
    TRAILER_BYTES,
    WAITING_MAX,
    Arrived,
    Giver,
    Inventory,
    Offer,
    Taker,
    checksum_of,
    hash_of,
    packed,
    words_of,
)
from tgi_patches.transport.link import Link
from tgi_patches.transport.state import LinkLimits, Phase

ROWS = (8, 4)
TOKENS = 5


def offer(number: int = 1, **changes: Any) -> Offer:
    made = Offer(
        f"{number:032x}", 7, number, 0, 1, TOKENS, ROWS, hash_of(range(TOKENS)), 3, -0.5, ((3, -0.5),)
    )
    return replace(made, **changes)


def planes(number: int = 1) -> Tensor:
    return torch.arange(number, number + 60, dtype=torch.uint8)


class Wired:
    """One end: its link, what it says, its clock."""

    def __init__(self, budget_bytes: int = 1000) -> None:
        self.now_s = 0.0
        self.said: list[tuple[str, str]] = []
        self.outcomes: list[tuple[int, str]] = []
        self.inventory = Inventory(budget_bytes, ttl_s=10.0)
        self.giver: Giver | None = None
        self.taker: Taker | None = None
        self.link = Link(LinkLimits(), moved=self._moved, lost=self._lost)
        self.communicator = FakeCommunicator()

    def connected(self) -> Wired:
        self.link.connect(self.communicator, self.now_s)
        self.communicator.connected = True
        self.link.poll(self.now_s)
        return self

    def gives(self) -> Giver:
        self.giver = Giver(self.link, self._say, lambda o, result: self.outcomes.append((o.sequence, result)))
        return self.giver

    def takes(self) -> Taker:
        def empty(size_bytes: int) -> Tensor:
            return torch.zeros(size_bytes, dtype=torch.uint8)

        self.taker = Taker(self.link, self._say, self.inventory, ROWS, empty, lambda: self.now_s)
        return self.taker

    def arrives(self, content: Iterable[int]) -> None:
        self.communicator.tensors[-1].copy_(torch.tensor(list(content), dtype=torch.uint8))
        self.communicator.finished = True
        self.link.poll(self.now_s)
        self.communicator.finished = False

    def _say(self, word: str, text: str) -> None:
        self.said.append((word, text))

    def _moved(self) -> None:
        for end in (self.giver, self.taker):
            if end is not None:
                end.moved()

    def _lost(self, reason: str) -> None:
        for end in (self.giver, self.taker):
            if end is not None:
                end.lost()


def test_an_offer_survives_its_line() -> None:
    made = offer(checksum=2**64 - 1, ended=True)
    assert Offer.from_json(made.to_json()) == made
    assert (made.kv_bytes, made.first.top) == (60, ((3, -0.5),))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"handle": 1}', offer().to_json().replace('"tokens":5', '"tokens":0')]
)
def test_what_is_no_offer_is_refused_in_words(text: str) -> None:
    with pytest.raises(ContractError):
        Offer.from_json(text)


def test_the_trailer_names_record_prompt_epoch_and_sequence() -> None:
    payload = packed(planes(), offer(number=2))
    assert payload[:60].equal(planes())
    assert payload.numel() == 60 + TRAILER_BYTES
    ids = hashlib.blake2b(struct.pack("<5I", *range(5)), digest_size=16).digest()
    wanted = b"tgiokv01" + (2).to_bytes(16, "big") + ids + struct.pack("<QQQ", 7, 2, 0)
    assert bytes(payload[60:].tolist()) == wanted


def test_planes_of_another_size_than_offered_are_not_packed_or_given() -> None:
    with pytest.raises(BridgeMiss) as caught:
        packed(planes()[:59], offer())
    assert caught.value.reason is MissReason.LAYOUT
    with pytest.raises(BridgeMiss) as caught:
        Wired().connected().gives().give(offer(), planes())
    assert caught.value.reason is MissReason.LAYOUT


def test_records_are_given_one_at_a_time_in_order() -> None:
    end = Wired().connected()
    giver = end.gives()
    for number in (1, 2):
        giver.give(offer(number), packed(planes(number), offer(number)))
    giver.poll(0.0)
    giver.poll(0.0)
    assert end.said == [("offer", offer(1).to_json())]
    assert end.communicator.calls == ["start"]
    giver.answered(offer(2).handle, "", 0.0)  # nobody asked that
    assert end.link.phase is Phase.OFFERED
    giver.answered(offer(1).handle, "", 0.0)
    giver.answered(offer(1).handle, "", 0.0)
    assert end.communicator.calls == ["start", "send"]
    giver.poll(0.0)
    assert len(end.said) == 1
    end.communicator.finished = True
    end.link.poll(0.1)
    giver.poll(0.1)
    assert (end.outcomes, len(end.said)) == ([(1, "ok")], 2)


def test_a_refusal_ends_one_record_and_the_next_is_offered() -> None:
    end = Wired().connected()
    giver = end.gives()
    for number in (1, 2):
        giver.give(offer(number), packed(planes(number), offer(number)))
    giver.poll(0.0)
    giver.answered(offer(1).handle, "layout", 0.0)
    giver.poll(0.0)
    assert end.outcomes == [(1, "layout")]
    assert [text for _, text in end.said] == [offer(1).to_json(), offer(2).to_json()]


def test_a_lost_link_ends_all_that_waits_for_it() -> None:
    end = Wired().connected()
    giver = end.gives()
    for number in (1, 2, 3):
        giver.give(offer(number), packed(planes(number), offer(number)))
    giver.poll(0.0)
    end.link.poll(2.0)  # no answer came
    assert end.outcomes == [(1, "link"), (2, "link"), (3, "link")]
    giver.answered(offer(1).handle, "", 2.1)
    assert end.communicator.calls == ["start", "abort"]


def test_more_than_a_link_can_hold_is_refused() -> None:
    giver = Wired().connected().gives()
    for number in range(1, WAITING_MAX + 1):
        giver.give(offer(number), packed(planes(), offer(number)))
    with pytest.raises(BridgeMiss) as caught:
        giver.give(offer(99), packed(planes(), offer(99)))
    assert caught.value.reason is MissReason.LINK


def lookup(end: Wired, number: int = 1, epoch: int = 7, tokens: int = TOKENS) -> Arrived:
    return end.inventory.lookup(f"{number:032x}", epoch, range(tokens), end.now_s)


def reason_of(end: Wired, **asked: Any) -> MissReason:
    with pytest.raises(BridgeMiss) as caught:
        lookup(end, **asked)
    return caught.value.reason


def test_what_was_offered_is_kept_and_found_by_its_handle() -> None:
    end = Wired().connected()
    taker = end.takes()
    made = offer(checksum=checksum_of(planes()))
    taker.offered(made.to_json(), 0.0)
    assert end.said == [("answer", made.handle)]
    assert reason_of(end) is MissReason.MISSING
    end.arrives(packed(planes(), made).tolist())
    arrived = lookup(end)
    assert arrived.planes.equal(planes())
    assert arrived.offer == made
    assert end.said[1:] == [("moved", made.handle)]
    assert taker.counts == {"ok": 1}
    assert (reason_of(end, epoch=8), reason_of(end, tokens=4)) == (MissReason.EPOCH, MissReason.TOKENS_DIFFER)
    end.inventory.release(made.handle)
    assert (reason_of(end), end.inventory.used_bytes) == (MissReason.MISSING, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence": 9}, "layout"),
        ({"handle": f"{5:032x}"}, "layout"),
        ({"tokens_hash": hash_of([1])}, "layout"),
        ({"epoch": 8}, "layout"),
        ({}, "checksum"),
    ],
)
def test_what_comes_instead_is_dropped_and_the_link_with_it(changes: dict[str, Any], reason: str) -> None:
    end = Wired().connected()
    taker = end.takes()
    made = offer(checksum=checksum_of(planes()))
    taker.offered(made.to_json(), 0.0)
    content = packed(planes(), replace(made, **changes))
    if not changes:
        content[17] ^= 1
    end.arrives(content.tolist())
    assert reason_of(end) is MissReason.MISSING
    assert taker.counts == {reason: 1}
    assert (end.link.phase, end.inventory.used_bytes) == (Phase.ABORTED, 0)
    assert end.communicator.calls[-1] == "abort"


def test_an_unfitting_offer_moves_nothing_and_leaves_the_link_ready() -> None:
    end = Wired(budget_bytes=100).connected()
    taker = end.takes()
    taker.offered(offer(rows=(8, 8)).to_json(), 0.0)
    taker.offered(offer(2, tokens=9).to_json(), 0.0)
    taker.offered("nonsense", 0.0)
    assert [text.split()[1] for _, text in end.said] == ["layout", "overwritten"]
    assert taker.counts == {"layout": 1, "overwritten": 1, "unsupported": 1}
    assert (end.link.phase, end.communicator.calls) == (Phase.READY, ["start"])


def test_an_offer_that_is_early_waits_for_the_connection() -> None:
    end = Wired()
    taker = end.takes()
    end.link.connect(end.communicator, 0.0)
    taker.offered(offer().to_json(), 0.0)
    taker.poll(0.0)
    assert end.said == []
    end.communicator.connected = True
    end.link.poll(0.1)
    taker.poll(0.1)
    taker.poll(0.1)
    assert end.said == [("answer", offer().handle)]


def test_an_offer_that_comes_before_the_last_record_was_seen_to_be_here_waits_for_it() -> None:
    """A giver is done with its record a little earlier than the taker."""
    end = Wired().connected()
    taker = end.takes()
    taker.offered(offer(1).to_json(), 0.0)
    taker.offered(offer(2).to_json(), 0.0)
    assert end.said == [("answer", offer(1).handle)]
    end.arrives(packed(planes(), offer(1)).tolist())
    taker.poll(0.1)
    assert end.said[1:] == [("moved", offer(1).handle), ("answer", offer(2).handle)]
    assert taker.counts == {"ok": 1}


def test_a_link_that_breaks_in_the_middle_gives_the_room_back() -> None:
    end = Wired().connected()
    taker = end.takes()
    taker.offered(offer().to_json(), 0.0)
    assert end.inventory.used_bytes == 60
    end.communicator.error = "remote process exited"
    end.link.poll(0.1)
    assert (end.inventory.used_bytes, taker.counts) == (0, {"link": 1})
    assert reason_of(end) is MissReason.MISSING


def test_the_budget_counts_what_is_promised_and_time_frees_what_is_held() -> None:
    inventory = Inventory(130, ttl_s=10.0)
    first, second, third = offer(1), offer(2), offer(3)
    assert inventory.promise(first, 0.0)
    assert not inventory.promise(first, 0.0)
    inventory.keep(Arrived(first, planes()), 1.0)
    assert inventory.promise(second, 2.0)
    assert not inventory.promise(third, 10.9)
    assert inventory.promise(third, 11.0)
    inventory.withdraw(second)
    inventory.withdraw(third)
    assert inventory.used_bytes == 0


def test_ranks_of_one_prompt_stand_side_by_side() -> None:
    inventory = Inventory(1000, ttl_s=10.0)
    for rank in (0, 1):
        inventory.keep(Arrived(offer(1, rank=rank, ranks=2), planes(rank)), 0.0)
    for rank in (0, 1):
        found = inventory.lookup(offer().handle, 7, range(TOKENS), 0.0, rank)
        assert found.planes.equal(planes(rank))


def test_an_answer_is_a_handle_and_perhaps_a_reason() -> None:
    assert words_of("abc") == ("abc", "")
    assert words_of("abc layout") == ("abc", "layout")
