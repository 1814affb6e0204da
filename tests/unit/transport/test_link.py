"""A link over a communicator that does what the test says: begun, looked at, aborted once."""

from __future__ import annotations

import torch

from tests.unit.transport.fakes import FakeCommunicator
from tgi_patches.transport.link import Link
from tgi_patches.transport.state import LinkLimits, Phase

TENSOR = torch.zeros(4, dtype=torch.uint8)


class Told:
    def __init__(self) -> None:
        self.moved = 0
        self.lost: list[str] = []

    def link(self) -> Link:
        return Link(LinkLimits(5.0, 2.0, 3.0, 0.5), moved=self._moved, lost=self.lost.append)

    def _moved(self) -> None:
        self.moved += 1


def ready(told: Told) -> tuple[Link, FakeCommunicator]:
    link, communicator = told.link(), FakeCommunicator()
    assert link.connect(communicator, 0.0)
    communicator.connected = True
    link.poll(0.0)
    assert link.phase is Phase.READY
    return link, communicator


def test_a_record_moves_and_the_link_is_ready_for_another() -> None:
    told = Told()
    link, communicator = ready(told)
    for _ in range(2):
        communicator.finished = False
        assert link.offer(1.0)
        link.send(TENSOR, 1.0)
        link.poll(1.1)
        assert (link.phase, link.busy) == (Phase.MOVING, True)
        communicator.finished = True
        link.poll(1.2)
        assert (link.phase, link.busy) == (Phase.READY, False)
    assert communicator.calls == ["start", "send", "send"]
    assert (told.moved, told.lost) == (2, [])


def test_it_connects_in_its_own_time_or_not_at_all() -> None:
    told = Told()
    link, communicator = told.link(), FakeCommunicator()
    link.connect(communicator, 0.0)
    link.poll(4.9)
    assert link.phase is Phase.CONNECTING
    link.poll(5.0)
    assert told.lost == ["connecting took too long"]
    assert communicator.calls == ["start", "abort"]
    link.poll(5.1)
    assert communicator.calls == ["start", "abort"]


def test_an_error_is_found_in_every_phase_and_aborts_once() -> None:
    for phase in ("connecting", "ready", "moving"):
        told = Told()
        link, communicator = told.link(), FakeCommunicator()
        link.connect(communicator, 0.0)
        if phase != "connecting":
            communicator.connected = True
            link.poll(0.0)
        if phase == "moving":
            link.offer(0.0)
            link.recv(TENSOR, 0.0)
        communicator.error = "remote process exited"
        link.poll(0.1)
        link.poll(0.2)
        assert told.lost == ["remote process exited"], phase
        assert communicator.calls.count("abort") == 1
        assert (link.phase, told.moved) == (Phase.ABORTED, 0)


def test_a_communicator_that_cannot_begin_is_aborted_at_once() -> None:
    told = Told()
    link, communicator = told.link(), FakeCommunicator()
    communicator.error = "no device"
    link.connect(communicator, 0.0)
    assert (communicator.calls, told.lost) == (["start", "abort"], ["no device"])
    told = Told()
    link, communicator = ready(told)
    link.offer(0.0)
    communicator.error = "unhandled"
    link.send(TENSOR, 0.0)
    assert (communicator.calls, told.lost) == (["start", "send", "abort"], ["unhandled"])


def test_after_a_rest_another_communicator_serves() -> None:
    told = Told()
    link, _ = ready(told)
    link.fail("the peer left", 10.0)
    assert not link.connect(FakeCommunicator(), 10.4)
    link.poll(10.5)
    fresh = FakeCommunicator()
    assert link.connect(fresh, 10.5)
    fresh.connected = True
    link.poll(10.6)
    assert link.phase is Phase.READY


def test_a_late_answer_of_a_former_life_begins_nothing() -> None:
    told = Told()
    link, communicator = ready(told)
    link.offer(0.0)
    link.poll(2.0)
    link.send(TENSOR, 2.1)
    assert communicator.calls == ["start", "abort"]
    assert told.lost == ["offered took too long"]


def test_only_a_ready_link_takes_an_offer() -> None:
    told = Told()
    link = told.link()
    assert not link.offer(0.0)
    link, _ = ready(told)
    assert link.offer(0.0)
    link.recv(TENSOR, 0.0)
    assert not link.offer(0.0)
    assert link.phase is Phase.MOVING
