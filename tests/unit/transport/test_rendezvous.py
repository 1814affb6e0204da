"""Lines in, lines out: how a sidecar brings links about; communicators without a peer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from tests.unit.transport.fakes import FakeCommunicator
from tgi_patches.bridge import ArenaError
from tgi_patches.contract import BridgeMiss, MissReason
from tgi_patches.transport.exchange import Inventory, Offer, hash_of, packed
from tgi_patches.transport.gloo import GlooMeeting
from tgi_patches.transport.lines import LINE_BYTES, LineReader, LineWriter
from tgi_patches.transport.link import LinkError
from tgi_patches.transport.rendezvous import Links, Local, answers_path, commands_path
from tgi_patches.transport.state import LinkLimits, Phase

ROWS = (8, 4)


class FakeMeeting:
    def __init__(self) -> None:
        self.made: list[tuple[str, int, FakeCommunicator]] = []
        self.error = ""

    def invite(self) -> str:
        if self.error:
            raise LinkError(self.error)
        return f"place{len(self.made)}"

    def communicator(self, where: str, rank: int) -> FakeCommunicator:
        if where == "nowhere":
            raise LinkError("that is no place")
        self.made.append((where, rank, FakeCommunicator()))
        return self.made[-1][2]


class Server:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.meeting = FakeMeeting()
        self.lines: list[str] = []
        self.outcomes: list[str] = []
        local = Local(
            Inventory(1000, 60.0),
            ROWS,
            lambda size: torch.zeros(size, dtype=torch.uint8),
            lambda: self.now_s,
            LinkLimits(connect_s=5.0, rest_s=0.5),
        )
        self.links = Links(
            local, self.meeting, self.lines.append, outcome=lambda _, result: self.outcomes.append(result)
        )

    def poll(self, now_s: float) -> None:
        self.now_s = now_s
        self.links.poll(now_s)

    def up(self) -> Server:
        self.meeting.made[-1][2].connected = True
        self.poll(self.now_s)
        return self


def offer() -> Offer:
    return Offer("0" * 32, 7, 1, 0, 1, 5, ROWS, hash_of(range(5)), 3, -0.5)


def payload() -> torch.Tensor:
    return packed(torch.zeros(60, dtype=torch.uint8), offer())


def test_an_invitation_names_a_new_place_and_waits_there_as_the_giver() -> None:
    server = Server()
    server.links.heard("invite d.0")
    assert server.lines == ["invited d.0 place0"]
    [(where, rank, communicator)] = server.meeting.made
    assert (where, rank, communicator.calls) == ("place0", 0, ["start"])
    assert (len(server.links), server.links.phase("d.0", giving=True)) == (1, Phase.CONNECTING)
    server.up()
    assert (len(server.links), server.links.phase("d.0", giving=True)) == (0, Phase.READY)


def test_who_joins_takes() -> None:
    server = Server()
    server.links.heard("join p.0 somewhere")
    assert server.meeting.made[0][:2] == ("somewhere", 1)
    server.up()
    server.links.heard(f"offer p.0 {offer().to_json()}")
    assert server.lines == [f"answer p.0 {offer().handle}"]
    assert server.meeting.made[0][2].calls == ["start", "recv"]


def test_a_record_is_offered_and_sent_once_it_was_accepted() -> None:
    server = Server()
    server.links.heard("invite d.0")
    server.up()
    server.links.give("d.0", offer(), payload())
    assert server.lines[1] == f"offer d.0 {offer().to_json()}"
    server.links.heard(f"answer d.0 {offer().handle}")
    communicator = server.meeting.made[0][2]
    assert communicator.calls == ["start", "send"]
    communicator.finished = True
    server.poll(0.1)
    assert server.outcomes == ["ok"]


def test_an_offer_that_is_heard_before_the_connection_was_seen_is_answered_after_it() -> None:
    server = Server()
    server.links.heard("join p.0 somewhere")
    server.links.heard(f"offer p.0 {offer().to_json()}")
    assert server.lines == []
    server.up()
    assert server.lines == [f"answer p.0 {offer().handle}"]


def test_a_record_that_waits_behind_a_refused_one_is_looked_after() -> None:
    """The loop polls as long as the links are not quiet."""
    server = Server()
    server.links.heard("invite d.0")
    server.up()
    for _ in range(2):
        server.links.give("d.0", offer(), payload())
    server.links.heard(f"answer d.0 {offer().handle} layout")
    assert len(server.links) == 1
    server.poll(0.1)
    assert [line.split()[0] for line in server.lines] == ["invited", "offer", "offer"]


def test_without_a_link_nothing_is_given() -> None:
    server = Server()
    for line in ("", "invite d.0"):
        server.links.heard(line)
    server.poll(5.0)
    assert server.lines[-1] == "lost d.0 connecting took too long"
    for peer in ("d.0", "x.0"):
        with pytest.raises(BridgeMiss) as caught:
            server.links.give(peer, offer(), payload())
        assert caught.value.reason is MissReason.LINK


def test_a_peer_that_comes_anew_replaces_its_former_life_after_a_rest() -> None:
    server = Server()
    server.links.heard("join p.0 one")
    server.up()
    server.links.heard("join p.0 two")
    assert server.lines == ["lost p.0 the peer comes anew"]
    assert server.meeting.made[0][2].calls == ["start", "abort"]
    server.links.heard("join p.0 three")
    assert server.lines[1] == "lost p.0 it rests: the peer comes anew"
    server.poll(0.5)
    server.links.heard("join p.0 four")
    assert [where for where, _, _ in server.meeting.made] == ["one", "four"]
    assert server.links.phase("p.0", giving=False) is Phase.CONNECTING


def test_a_place_that_is_none_and_a_library_that_is_not_there_are_told() -> None:
    server = Server()
    server.links.heard("join p.0 nowhere")
    server.meeting.error = "NCCL cannot be loaded"
    server.links.heard("invite d.0")
    assert server.lines == ["lost p.0 that is no place", "lost d.0 NCCL cannot be loaded"]
    assert (server.links.phase("p.0", giving=False), len(server.links)) == (Phase.IDLE, 0)


def test_a_peer_that_leaves_and_a_warmup_that_comes_abort_their_links() -> None:
    server = Server()
    server.links.heard("invite d.0")
    server.up()
    server.links.heard("leave d.0")
    assert server.lines[-1] == "lost d.0 the peer left"
    server.links.heard("join p.0 x")
    server.up()
    server.links.close()
    assert server.lines[-1] == "lost p.0 closed"
    assert all(communicator.calls[-1] == "abort" for _, _, communicator in server.meeting.made)


@pytest.mark.parametrize("line", ["", "invite", "invite a/b", "offer p.0 {}", "answer d.0 x", "dance d.0 x"])
def test_what_is_none_of_ours_is_ignored(line: str) -> None:
    server = Server()
    server.links.heard(line)
    assert (server.lines, server.meeting.made) == ([], [])


def test_links_in_both_directions_are_two() -> None:
    server = Server()
    server.links.heard("invite x.0")
    server.up()
    server.links.heard("join x.0 there")
    assert server.links.phase("x.0", giving=True) is Phase.READY
    assert server.links.phase("x.0", giving=False) is Phase.CONNECTING


# --- lines through a FIFO ---


async def test_lines_arrive_whole_and_in_order(tmp_path: Path) -> None:
    got: list[str] = []
    three = asyncio.Event()

    def heard(line: str) -> None:
        got.append(line)
        if len(got) == 3:
            three.set()

    reader, writer = LineReader(tmp_path / "fifo", heard), LineWriter(tmp_path / "fifo")
    reader.open()
    long = "x" * (LINE_BYTES - 1)
    assert [writer.write(line) for line in ("one", long, "three")] == [True] * 3
    await asyncio.wait_for(three.wait(), 5)
    assert got == ["one", long, "three"]
    writer.close()
    reader.close()


def test_a_line_that_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    assert not LineWriter(tmp_path / "fifo").write("nobody made it")
    os.mkfifo(tmp_path / "fifo")
    assert not LineWriter(tmp_path / "fifo").write("nobody reads")
    (tmp_path / "file").write_text("")
    assert not LineWriter(tmp_path / "file").write("no FIFO")
    assert (tmp_path / "file").read_text() == ""
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = LineWriter(tmp_path / "fifo")
    assert not writer.write("x" * LINE_BYTES)
    written = 0
    while writer.write("y" * 1000):
        written += 1
    assert written > 10
    writer.close()
    os.close(reader)


async def test_a_writer_finds_the_next_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    first = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = LineWriter(tmp_path / "fifo")
    assert writer.write("one")
    assert os.read(first, 100) == b"one\n"
    os.close(first)
    second = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert writer.write("two")
    assert os.read(second, 100) == b"two\n"
    os.close(second)
    writer.close()


def test_fifos_stand_beside_the_arena(tmp_path: Path) -> None:
    assert commands_path(tmp_path, "dep", "p1", 2) == tmp_path / "dep" / "p1.2.commands"
    assert answers_path(tmp_path, "dep", "p1", 2) == tmp_path / "dep" / "p1.2.answers"
    with pytest.raises(ArenaError):
        commands_path(tmp_path, "dep", "../p1", 0)


def test_a_meeting_over_gloo_takes_names_and_no_paths(tmp_path: Path) -> None:
    meeting = GlooMeeting(tmp_path)
    assert meeting.invite() != meeting.invite()
    with pytest.raises(LinkError):
        meeting.communicator("../elsewhere", 1)
