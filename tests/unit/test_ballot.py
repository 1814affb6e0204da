"""Ranks that decide together: real processes, one shared page."""

from __future__ import annotations

import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tgi_patches.ballot import Ballot, ballot_path
from tgi_patches.bridge import ArenaError

ROUNDS = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "dep").mkdir()
    return ballot_path(tmp_path, "dep", "d0")


def votes_of(rank: int) -> list[bool]:
    """Two in three are yes, by a dice of the rank's own."""
    dice = random.Random(rank)
    return [dice.random() < 0.67 for _ in range(ROUNDS)]


def vote(path: Path, rank: int, ranks: int, said: object) -> None:
    ballot = Ballot(path, epoch=7, rank=rank, ranks=ranks)
    said.put((rank, [ballot.agree(yes) for yes in votes_of(rank)]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_hears_yes_exactly_where_all_said_yes(path: Path, ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    voters = [context.Process(target=vote, args=(path, rank, ranks, said)) for rank in range(ranks)]
    for voter in reversed(voters):  # rank 0 makes the file last
        voter.start()
    heard = dict(said.get(timeout=60) for _ in voters)
    for voter in voters:
        voter.join(30)
    expected = [all(votes) for votes in zip(*(votes_of(rank) for rank in range(ranks)), strict=True)]
    assert 0 < sum(expected) < ROUNDS
    assert heard == dict.fromkeys(range(ranks), expected)


def both(path: Path, *, votes_limit_s: float = 30.0) -> tuple[Ballot, Ballot]:
    return (
        Ballot(path, 7, 0, 2, votes_limit_s=votes_limit_s),
        Ballot(path, 7, 1, 2, verdict_limit_s=30.0),
    )


def test_a_rank_that_comes_too_late_hears_no_and_the_next_question_is_a_new_one(path: Path) -> None:
    lead, other = both(path, votes_limit_s=0.01)
    assert lead.agree(True) is False  # the other one has not voted
    assert other.agree(True) is False  # the verdict stands
    other_says = [False]
    late = threading.Thread(target=lambda: other_says.append(other.agree(True)))
    late.start()
    lead._votes_limit_s = 30.0
    assert lead.agree(True) is True
    late.join(30)
    assert other_says == [False, True]


def test_a_rank_alone_never_takes_a_yes_for_itself(path: Path) -> None:
    _, other = both(path)
    other._verdict_limit_s = 0.01
    assert other.agree(True) is False


def test_the_others_wait_for_rank_0_of_their_own_epoch(path: Path) -> None:
    Ballot(path, epoch=6, rank=0, ranks=2).close()
    with pytest.raises(ArenaError, match="Rank 0 did not make"):
        Ballot(path, epoch=7, rank=1, ranks=2, open_limit_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ballot, path, 7, 1, 2)
        lead = Ballot(path, epoch=7, rank=0, ranks=2)
        other = waiting.result(30)
        answer = pool.submit(other.agree, True)
        assert lead.agree(True)
        assert answer.result(30)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="cannot meet in"):
        Ballot(tmp_path / "absent" / "d0.ballot", epoch=1, rank=0, ranks=2)
