"""The event stream parser, in pieces of every size."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import sse
from orchestrator.core.sse import BrokenStream, Event, Parser

LINE_ENDS = st.sampled_from([b"\n", b"\r\n"])
# A payload line may hold anything but a line end.
LINES = st.binary(max_size=20).map(lambda line: line.replace(b"\n", b".").replace(b"\r", b"."))


def parsed(stream: bytes, size: int) -> list[Event]:
    parser = Parser()
    events: list[Event] = []
    for start in range(0, len(stream), size):
        events += parser.feed(stream[start : start + size])
    return events + parser.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("stream", "datas"),
    [
        (b"data:{}\n\n", [b"{}"]),
        (b"data: {}\n\n", [b"{}"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"data:a\r\n\r\ndata:b\r\n\r\n", [b"a", b"b"]),
        (b"data:a\r\rdata:b\r\r", [b"a", b"b"]),
        (b"data:a\n\r\ndata:b\r\n\n", [b"a", b"b"]),
        (b"data:one\ndata:two\n\n", [b"one\ntwo"]),
        (b"data\n\n", [b""]),
        (b": comment\n\n", [None]),
        (b": comment\ndata:a\n\n", [b"a"]),
        (b":\n\ndata:a\n\n", [None, b"a"]),
        (b"event: x\nid: 1\nretry: 5\ndata:a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata:a\n\n", [b"a"]),
        (b"data:cut off", []),
        (b"data:a\n\ndata:cut off\n", [b"a"]),
        (b"database:x\n\n", [None]),
        (b"", []),
    ],
)
def test_stream_in_pieces(stream: bytes, datas: list[bytes | None], size: int) -> None:
    assert [event.data for event in parsed(stream, size)] == datas


def test_event_is_there_as_soon_as_its_last_byte_is() -> None:
    parser = Parser()
    assert parser.feed(b"data:a\n") == []
    assert [event.data for event in parser.feed(b"\n")] == [b"a"]
    assert parser.feed(b"data:b\r\n\r") == []
    assert [event.data for event in parser.feed(b"\n")] == [b"b"]


def test_several_events_in_one_read() -> None:
    assert [event.data for event in Parser().feed(b"data:a\n\ndata:b\n\ndata:c\n\n")] == [b"a", b"b", b"c"]


def test_multibyte_characters_may_be_cut_anywhere() -> None:
    text = "🦊 läuft, 好的"
    stream = sse.tgi_event({"text": text})
    for size in range(1, len(stream)):
        [event] = parsed(stream, size)
        assert orjson.loads(event.data or b"") == {"text": text}


@given(
    blocks=st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), LINE_ENDS), max_size=5),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=40),
)
def test_what_is_written_is_read_however_it_is_cut(
    blocks: list[tuple[list[bytes], bytes]], cuts: list[int]
) -> None:
    raws = [b"".join(b"data:" + line + end for line in lines) + end for lines, end in blocks]
    # One space after the colon belongs to the format.
    datas = [b"\n".join(line.removeprefix(b" ") for line in lines) for lines, _ in blocks]
    stream, parser, events, turn = b"".join(raws), Parser(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        events += parser.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    events += parser.finish()
    assert [event.data for event in events] == datas
    assert [event.raw for event in events] == raws


@given(stream=st.binary(max_size=200), size=st.integers(1, 20))
def test_no_bytes_break_the_parser_and_pieces_do_not_matter(stream: bytes, size: int) -> None:
    assert parsed(stream, size) == parsed(stream, max(1, len(stream)))


def test_event_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_LIMIT_BYTES", 100)
    parser = Parser()
    parser.feed(b"data:" + b"x" * 90)
    with pytest.raises(BrokenStream):
        parser.feed(b"x" * 90)


def test_dialects() -> None:
    assert sse.tgi_event({"a": None}) == b'data:{"a":null}\n\n'
    assert sse.openai_event({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()
    assert sse.DONE == b"data: [DONE]\n\n"
    assert sse.comment("hello") == b": hello\n\n"
    assert [event.data for event in Parser().feed(sse.comment("hello") + sse.KEEP_ALIVE)] == [None, None]
