"""The passage lets the same through however its stream was cut, as reading every event would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.core import passage as passages
from orchestrator.core import sse
from orchestrator.core.passage import Passage
from orchestrator.core.redress import Dialect

TAG = "lora|kv1:get:p0.5:0123456789abcdef0123456789abcdef:7"
MODEL = 'their "model"'
DONE = "[DONE]"


# --- a slow reference, which knows nothing of the passage's ways ---------------------------------


@dataclass(slots=True)
class Told:
    """What a client gets, as it reads it, and what the gateway knows afterwards."""

    datas: list[Any] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    error: Any = None
    broken: bool = False


def blocks(stream: str) -> Iterator[list[str]]:
    """The lines of each complete event, as the specification of event streams splits them."""
    lines = stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    block: list[str] = []
    for line in lines[:-1]:  # the last one has no line end
        if line:
            block.append(line)
        elif block:
            yield block
            block = []


def datas(stream: str) -> Iterator[str]:
    for block in blocks(stream):
        fields = [line[5:].removeprefix(" ") for line in block if line.startswith("data:")]
        if fields:
            yield "\n".join(fields)


def ends(dialect: Dialect, event: dict[str, Any]) -> int:
    if dialect is Dialect.TGI:
        return 1 if event.get("generated_text") is not None else 0
    return sum(1 for choice in event.get("choices", []) if choice.get("finish_reason"))


def slowly(dialect: Dialect, stream: str, tag: str, answers: int) -> Told:
    told, left = Told(), answers
    for data in datas(stream):
        if data == DONE:
            told.datas.append(DONE)
            left = 0  # whatever was said before
            continue
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            if left > 0:
                told.broken = True
                break
            told.datas.append(data)  # after the end nobody looks
            continue
        if event.get("error") is not None:
            told.error = event
            break
        if left > 0:
            told.tokens += 1
            left -= ends(dialect, event)
        if dialect is not Dialect.TGI and tag and event.get("model") == tag:
            event["model"] = MODEL
        told.datas.append(event)
    told.ended = left <= 0
    return told


# --- streams ------------------------------------------------------------------------------------

# What looks like something else: patterns of ends and errors, marks of tags, other scripts, nothing.
ODD = [
    "",
    "\n\n",
    "\r",
    'data:{"error":"no"}\n\n',
    '"generated_text":null',
    '"finish_reason":null',
    '"finish_reason":"stop"',
    '"error"',
    "|kv1:get:",
    f'"{TAG}"',
    f"about {TAG}",
    DONE,
    "naïve 日本語 🚢",
    "\u2028\x00\x7f",
]
TEXTS = st.sampled_from(ODD) | st.text(max_size=6)


def tgi(text: str, *, last: bool = False, which: int = 0) -> dict[str, Any]:
    token = {"id": 7, "text": text, "logprob": -0.5, "special": False}
    details = {"finish_reason": "length", "generated_tokens": 2} if last else None
    return {"index": which, "token": token, "generated_text": text if last else None, "details": details}


def chat(text: str, *, last: bool = False, which: int = 0) -> dict[str, Any]:
    choice = {"index": which, "delta": {"content": text}, "finish_reason": "stop" if last else None}
    return {"id": "", "model": TAG, "choices": [choice], "usage": None}


def completion(text: str, *, last: bool = False, which: int = 0) -> dict[str, Any]:
    choice = {"index": which, "text": text, "finish_reason": "length" if last else ""}
    return {"id": "", "model": TAG, "choices": [choice]}


EVENTS: dict[Dialect, Callable[..., dict[str, Any]]] = {
    Dialect.TGI: tgi,
    Dialect.CHAT: chat,
    Dialect.COMPLETION: completion,
}
ERRORS: dict[Dialect, dict[str, Any]] = {
    Dialect.TGI: {"error": "Request failed", "error_type": "generation"},
    Dialect.CHAT: {"error": {"message": "Request failed", "http_status_code": 424}},
    Dialect.COMPLETION: {"error": {"message": "Request failed", "http_status_code": 424}},
}
GARBAGE = '{"choices'
USAGE = {"id": "", "model": TAG, "choices": [], "usage": {"completion_tokens": 3}}


@dataclass(frozen=True, slots=True)
class Case:
    dialect: Dialect
    stream: bytes
    cuts: tuple[int, ...]
    tag: str
    answers: int

    @property
    def pieces(self) -> Iterator[bytes]:
        places = [0, *sorted({cut % (len(self.stream) + 1) for cut in self.cuts}), len(self.stream)]
        for start, end in pairwise(places):
            yield self.stream[start:end]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dialect = draw(st.sampled_from(Dialect))
    answers = draw(st.integers(1, 3))
    event = EVENTS[dialect]
    made = [
        event(draw(TEXTS), last=last, which=draw(st.integers(0, answers - 1)))
        for last in draw(st.lists(st.sampled_from([False, False, False, True]), max_size=8))
    ]
    lines = [f"data:{draw(st.sampled_from(['', ' ']))}{_json(draw, each)}" for each in made]
    for extra in draw(
        st.lists(st.sampled_from(["usage", "done", "error", "comment", "garbage", "retry"]), max_size=3)
    ):
        line = {
            "usage": f"data: {json.dumps(USAGE)}",
            "done": f"data: {DONE}",
            "error": f"data:{json.dumps(ERRORS[dialect])}",
            "comment": ": still here",
            "garbage": f"data:{GARBAGE}",
            "retry": "event: message\nid: 1\nretry: 5",
        }[extra]
        lines.insert(draw(st.integers(0, len(lines))), line)
    end = draw(st.sampled_from(["\n", "\n", "\n", "\r\n", "\r"]))
    stream = "".join(
        line.replace("\n", end) + end * 2 + end * draw(st.sampled_from([0, 0, 0, 1])) for line in lines
    )
    stream += draw(st.sampled_from(["", "", 'data:{"generated_text":null', f"data:cut off{end}"]))
    cuts = (
        draw(st.lists(st.integers(0, 4000), max_size=12))
        if draw(st.booleans())
        else range(len(stream.encode()))
    )
    return Case(dialect, stream.encode(), tuple(cuts), draw(st.sampled_from(["", TAG])), answers)


def _json(draw: st.DrawFn, event: dict[str, Any]) -> str:
    """As TGI's router writes it, or with spaces, with escapes, with a tag in another spelling."""
    written = (
        orjson.dumps(event).decode() if draw(st.sampled_from([True, True, False])) else json.dumps(event)
    )
    return written.replace("p0.5", "p0\\u002e5") if draw(st.sampled_from([False, False, True])) else written


def through(passage: Passage, pieces: Iterable[bytes]) -> bytes:
    return b"".join(map(passage.feed, pieces)) + passage.finish()


def read(sent: bytes) -> list[Any]:
    return [data if data in (DONE, GARBAGE) else json.loads(data) for data in datas(sent.decode())]


@settings(max_examples=200, deadline=None)
@given(cases())
@example(Case(Dialect.CHAT, b'data: {"error":null,"choices":[]}\n\n', (), TAG, 1))
def test_any_cutting_lets_through_what_reading_every_event_would(case: Case) -> None:
    passage = Passage(case.dialect, tag=case.tag, model=MODEL, ends=case.answers)
    told = slowly(case.dialect, case.stream.decode(), case.tag, case.answers)
    assert read(through(passage, case.pieces)) == told.datas
    assert (passage.tokens, passage.ended) == (told.tokens, told.ended)
    assert (None if passage.error_data is None else json.loads(passage.error_data)) == told.error
    assert (passage.failure is not None) == told.broken
    assert passage.over == (told.broken or told.error is not None)


def canonical(dialect: Dialect, texts: list[str]) -> list[bytes]:
    return [b"data:" + orjson.dumps(EVENTS[dialect](text)) + b"\n\n" for text in texts]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_what_is_not_touched_arrives_byte_for_byte(dialect: Dialect, size: int) -> None:
    stream = b"".join(canonical(dialect, ODD))
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert through(Passage(dialect), pieces) == stream


def test_events_go_on_as_soon_as_their_last_byte_is_there() -> None:
    passage = Passage(Dialect.TGI)
    first, second = canonical(Dialect.TGI, ["a", "b"])
    assert passage.feed(first + second[:-1]) == first
    assert passage.feed(second[-1:]) == second


def test_an_event_that_is_cut_off_is_never_sent() -> None:
    passage = Passage(Dialect.TGI)
    (whole,) = canonical(Dialect.TGI, ["a"])
    assert passage.feed(whole + whole[:-1]) + passage.finish() == whole
    assert passage.tokens == 1


def test_nothing_follows_an_error_whether_in_its_piece_or_later() -> None:
    first, later = canonical(Dialect.TGI, ["a", "b"])
    error = b'data:{"error":"no","error_type":"generation"}\n\n'
    passage = Passage(Dialect.TGI)
    assert passage.feed(first + error + later) == first
    assert passage.feed(later) + passage.feed(later.replace(b"\n", b"\r")) + passage.finish() == b""
    assert passage.error_data == error[5:-2]
    assert (passage.tokens, passage.over, passage.failure) == (1, True, None)


@pytest.mark.parametrize(
    "garbage",
    [
        b"data:{\n\n",
        b"data:[]\n\n",
        b'data:{"choices":[1]}\n\n',
        b'data:{"choices":1}\n\n',
        b'data:"error"}\n\n',
    ],
)
def test_what_stands_before_an_event_that_cannot_be_read_is_sent(garbage: bytes) -> None:
    first, later = canonical(Dialect.CHAT, ["a", "b"])
    passage = Passage(Dialect.CHAT)
    assert passage.feed(first + garbage + later) == first
    assert isinstance(passage.failure, ValueError)
    assert passage.feed(later) + passage.finish() == b""
    assert (passage.tokens, passage.over, passage.ended) == (1, True, False)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_endless_event_is_a_failure_and_what_came_before_is_sent(
    line_end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EVENT_LIMIT_BYTES", 5000)
    monkeypatch.setattr(passages, "LARGE_EVENT_BYTES", 1000)
    first = canonical(Dialect.TGI, ["a"])[0].replace(b"\n", line_end)
    passage = Passage(Dialect.TGI)
    sent = passage.feed(first + b"data:")
    for _ in range(49):
        sent += passage.feed(b"x" * 100)
    assert (sent, passage.over) == (first, False)
    assert passage.feed(b"x" * 100) == b""
    assert isinstance(passage.failure, ValueError)
    assert passage.feed(line_end * 2 + first) == b""


def test_a_large_event_passes_and_so_does_what_follows_it() -> None:
    large, small = canonical(Dialect.TGI, ["x" * 500_000, "b"])
    stream = small + large + small
    passage = Passage(Dialect.TGI)
    assert through(passage, [stream[at : at + 60_000] for at in range(0, len(stream), 60_000)]) == stream
    assert (passage.tokens, passage.over) == (3, False)


def test_the_event_that_the_client_has_already_may_have_been_the_last() -> None:
    passage = Passage(Dialect.TGI)
    ended = []
    for last in (False, True):
        passage.ends(orjson.dumps(tgi("a", last=last)))
        ended.append(passage.ended)
    assert ended == [False, True]
    with pytest.raises(ValueError, match="unexpected end"):
        passage.ends(b"{")


def test_after_the_end_nothing_counts_as_a_token() -> None:
    passage = Passage(Dialect.CHAT, tag=TAG, model="m")
    last = b"data: " + orjson.dumps(chat("a", last=True)) + b"\n\n"
    usage = b"data: " + orjson.dumps(USAGE) + b"\n\n"
    sent = passage.feed(last + usage + sse.DONE)
    assert sent == (last + usage).replace(TAG.encode(), b"m") + sse.DONE
    assert (passage.tokens, passage.ended) == (1, True)
