"""Ranks that decide together: real processes, one shared page."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tgi_patches.ballot import NUMBER_BITS, Ballot, ballot_path
from tgi_patches.bridge import ArenaError

ROUNDS = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "dep").mkdir()
    return ballot_path(tmp_path, "dep", "d0")


def votes_of(rank: int) -> list[int]:
    """Two in three are 80, the others 40 or 0, by a dice of the rank's own."""
    dice = random.Random(rank)
    return [dice.choice((80, 80, 80, 80, 40, 0)) for _ in range(ROUNDS)]


def vote(path: Path, rank: int, ranks: int, said: object) -> None:
    ballot = Ballot(path, epoch=7, rank=rank, ranks=ranks)
    said.put((rank, [ballot.agree(number) for number in votes_of(rank)]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_hears_the_number_that_all_gave_and_else_none(path: Path, ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    voters = [context.Process(target=vote, args=(path, rank, ranks, said)) for rank in range(ranks)]
    for voter in reversed(voters):  # rank 0 makes the file last
        voter.start()
    heard = dict(said.get(timeout=60) for _ in voters)
    for voter in voters:
        voter.join(30)
    rounds = zip(*(votes_of(rank) for rank in range(ranks)), strict=True)
    expected = [votes[0] if len(set(votes)) == 1 else 0 for votes in rounds]
    assert {0, 40, 80} == set(expected)
    assert heard == dict.fromkeys(range(ranks), expected)


def test_a_rank_that_comes_too_late_hears_no_and_the_next_question_is_a_new_one(path: Path) -> None:
    lead, other = Ballot(path, 7, 0, 2), Ballot(path, 7, 1, 2)
    assert lead.agree(9, votes_limit_s=0.01) == 0  # the other one has not voted
    assert other.agree(9) == 0  # the verdict stands
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other.agree, 9)
        assert lead.agree(9, votes_limit_s=30.0) == 9
        assert later.result(30) == 9


def test_a_rank_that_waits_for_a_late_rank_0_never_decides_alone(path: Path) -> None:
    """Rank 0 was held up: there is one verdict all the same."""
    lead, other = Ballot(path, 7, 0, 2), Ballot(path, 7, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.agree, 3)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        assert lead.agree(3) == 3
        assert waiting.result(30) == 3


def test_a_number_that_is_too_large_for_a_word_touches_no_round(path: Path) -> None:
    lead, other = Ballot(path, 7, 0, 2), Ballot(path, 7, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            answer = pool.submit(other.agree, (1 << NUMBER_BITS) - 1)
            assert lead.agree((1 << NUMBER_BITS) - 1) == answer.result(30) == (1 << NUMBER_BITS) - 1


def test_the_others_wait_for_rank_0_of_their_own_epoch(path: Path) -> None:
    Ballot(path, epoch=6, rank=0, ranks=2).close()
    with pytest.raises(ArenaError, match="Rank 0 did not make"):
        Ballot(path, epoch=7, rank=1, ranks=2, open_limit_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ballot, path, 7, 1, 2)
        lead = Ballot(path, epoch=7, rank=0, ranks=2)
        other = waiting.result(30)
        answer = pool.submit(other.agree, 1)
        assert lead.agree(1) == 1
        assert answer.result(30) == 1


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="cannot meet in"):
        Ballot(tmp_path / "absent" / "d0.ballot", epoch=1, rank=0, ranks=2)
