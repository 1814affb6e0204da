"""The key is proved for one frame of one connection, by one side."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest

from tgi_patches.pull.proof import Session
from tgi_patches.pull.wire import Kind, WireError

SESSION = Session(b"k" * 16, b"a" * 32, b"b" * 32)


def test_a_proof_is_the_hmac_of_everything_that_it_covers() -> None:
    parts = [b"puller", b"a" * 32, b"b" * 32, b"3", b"FETCH", b"body"]
    covered = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    expected = hmac.new(b"k" * 16, covered, hashlib.sha256).hexdigest().encode()
    assert SESSION.request(3, Kind.FETCH, b"body") == expected
    assert SESSION.asked_for(b"body" + expected, 3, Kind.FETCH) == b"body"


@pytest.mark.parametrize(
    "other",
    [
        replace(SESSION, key=b"K" * 16),
        replace(SESSION, asked=b"x" * 32),
        replace(SESSION, answered=b"x" * 32),
        replace(SESSION, asked=SESSION.answered, answered=SESSION.asked),
    ],
)
def test_a_proof_is_of_no_use_elsewhere(other: Session) -> None:
    asked = b"body" + SESSION.request(0, Kind.FETCH, b"body")
    answer = b"data" + SESSION.answer(0, b"body", Kind.DATA, b"data")
    assert SESSION.answered_with(answer, 0, b"body", Kind.DATA) == b"data"
    with pytest.raises(WireError):
        other.asked_for(asked, 0, Kind.FETCH)
    with pytest.raises(WireError):
        other.answered_with(answer, 0, b"body", Kind.DATA)


def test_a_proof_is_of_no_use_for_anything_else() -> None:
    asked = b"body" + SESSION.request(0, Kind.FETCH, b"body")
    answer = b"data" + SESSION.answer(0, b"body", Kind.DATA, b"data")
    refused = [
        lambda: SESSION.asked_for(asked, 1, Kind.FETCH),
        lambda: SESSION.asked_for(asked, 0, Kind.DESCRIBE),
        lambda: SESSION.asked_for(b"x" + asked, 0, Kind.FETCH),
        lambda: SESSION.asked_for(asked[:-1], 0, Kind.FETCH),
        lambda: SESSION.asked_for(b"", 0, Kind.FETCH),
        lambda: SESSION.answered_with(asked, 0, b"body", Kind.FETCH),
        lambda: SESSION.answered_with(answer, 1, b"body", Kind.DATA),
        lambda: SESSION.answered_with(answer, 0, b"other", Kind.DATA),
        lambda: SESSION.answered_with(answer, 0, b"body", Kind.FOUND),
    ]
    for attempt in refused:
        with pytest.raises(WireError, match="not proved"):
            attempt()


def test_without_a_key_nothing_is_proved_and_nothing_travels() -> None:
    open_session = replace(SESSION, key=b"")
    assert open_session.request(0, Kind.FETCH, b"body") == b""
    assert open_session.asked_for(b"body", 0, Kind.FETCH) == b"body"
