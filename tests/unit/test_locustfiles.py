"""The load generator's pure parts; they run without Locust."""

from __future__ import annotations

import json
import math
import statistics
from random import Random

import pytest

from locustfiles.tgi_load.answers import Fault, read_chat, read_error, read_tgi
from locustfiles.tgi_load.lengths import CHAT, CODE, LONG_PROMPT, Lengths, Limits, turns
from locustfiles.tgi_load.sse import EventStream
from locustfiles.tgi_load.tally import Tally
from locustfiles.tgi_load.texts import CODE_STOPS, code, prose, question
from locustfiles.tgi_load.timing import Outcome, Reading, outcome, tpot_ms


def token(text: str, last: bool = False, special: bool = False) -> str:
    event = {
        "index": 1,
        "token": {"id": 5, "text": text, "logprob": -1.0, "special": special},
        "generated_text": "all of it" if last else None,
        "details": {"finish_reason": "length", "generated_tokens": 9, "input_length": 70} if last else None,
    }
    return json.dumps(event, ensure_ascii=False)


def chunk(content: str | None, **more: object) -> str:
    return json.dumps(
        {"object": "chat.completion.chunk", "choices": [{"delta": {"content": content}}], **more}
    )


# Streams


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("raw", "events"),
    [
        ("data:{1}\n\ndata: {2}\n\n", ["{1}", "{2}"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\ndata: b\r\n\r\n", ["a\nb"]),
        (": keep-alive\n\ndata: a\n\n:\n\ndata: b\n\n", ["a", "b"]),
        ("event: message\nid: 4\ndata: a\n\n", ["a"]),
        ("data: a\ndata:b\n\n", ["a\nb"]),
        ("data:  two\n\n", [" two"]),
        ("data: [DONE]\n\n", ["[DONE]"]),
        ("data: héé 🚢\n\n", ["héé 🚢"]),
        ("data: a\n\ndata: cut", ["a"]),
        ("data: a\r\rdata: b\n\n", ["a", "b"]),
        ("data\n\ndatabase: 7\n\n", [""]),
        ("\n\n\n", []),
    ],
)
def test_events_are_the_same_in_pieces_of_any_size(raw: str, events: list[str], size: int) -> None:
    stream, whole = EventStream(), raw.encode()
    found = [
        event for start in range(0, len(whole), size) for event in stream.feed(whole[start : start + size])
    ]
    assert found == events


def test_an_event_is_told_by_the_byte_that_ends_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n") == []
    assert stream.feed(b"\n") == ["a"]


# Events


def test_tgis_events_are_read_with_their_tokens_end_and_counts() -> None:
    piece = read_tgi(token(" ship"))
    assert (piece.text, piece.tokens, piece.last, piece.generated_tokens) == (" ship", 1, False, None)
    piece = read_tgi(token("</s>", last=True, special=True))
    assert (piece.text, piece.tokens, piece.last) == ("", 1, True)
    assert (piece.generated_tokens, piece.prompt_tokens) == (9, 70)


def test_chat_events_are_read_with_usage_and_done() -> None:
    piece = read_chat(chunk("Hi"))
    assert (piece.text, piece.tokens, piece.last) == ("Hi", 1, False)
    assert read_chat(chunk("")).tokens == 0
    assert read_chat(chunk(None)).text == ""
    usage = '{"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}}'
    assert (read_chat(usage).generated_tokens, read_chat(usage).prompt_tokens) == (4, 30)
    assert read_chat("[DONE]").last


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (422, b'{"error": "too long", "error_type": "validation"}', Fault(422, "validation", "too long")),
        (429, b'{"error": "full", "error_type": "overloaded"}', Fault(429, "overloaded", "full")),
        (401, b'{"error": {"message": "no key", "type": "auth"}}', Fault(401, "auth", "no key")),
        (502, b"<html>bad gateway", Fault(502, "http", "<html>bad gateway")),
        (500, b"[1]", Fault(500, "http", "[1]")),
        (503, b"", Fault(503, "http")),
    ],
)
def test_an_error_is_read_in_any_form(status: int, body: bytes, fault: Fault) -> None:
    assert read_error(status, body) == fault


def test_refusals_are_429_and_an_overload_that_tgi_tells_inside_a_stream() -> None:
    assert read_error(429, b"slow down").refused
    overloaded = read_tgi('{"error": "Model is overloaded", "error_type": "overloaded"}').fault
    assert overloaded is not None
    assert overloaded.refused
    openai = read_chat('{"error": {"message": "full", "http_status_code": 429}, "error_type": "overloaded"}')
    assert openai.fault == Fault(429, "overloaded", "full")
    assert not Fault(422, "validation").refused
    assert not Fault(500, "generation").refused


def test_faults_of_a_kind_have_one_name() -> None:
    first = Fault(422, "validation", "`inputs` must have less than 4096 tokens. Given: 5000")
    second = Fault(422, "validation", "`inputs` must have less than 4096 tokens.\nGiven: 77")
    assert str(first) == str(second) == "422 validation: `inputs` must have less than N tokens. Given: N"
    assert str(Fault(0, "timeout")) == "timeout"
    assert len(str(Fault(500, "generation", "long " * 1000))) < 150


# TTFT and TPOT


def fed(*events: tuple[float, str]) -> Reading:
    reading = Reading(read_tgi)
    for now_s, event in events:
        reading.take(f"data:{event}\n\n".encode(), now_s)
    reading.end()
    return reading


def test_ttft_is_the_first_token_with_text() -> None:
    reading = fed((0.2, token("")), (0.5, token("a")), (0.6, token("b")), (1.5, token("c", last=True)))
    assert reading.ttft_s == 0.5
    assert reading.text == "abc"
    assert reading.tokens == 9, "the server's own count goes before ours"
    done = outcome("chat", reading, 100.0, 1.7, "separated")
    assert (done.kind, done.ttft_ms, done.total_ms, done.route) == ("done", 500.0, 1700.0, "separated")
    assert done.tpot_ms == pytest.approx((1700 - 500) / 8)


def test_tpot_needs_two_tokens_and_a_first_one() -> None:
    assert tpot_ms(1000.0, 400.0, 4) == 200.0
    assert tpot_ms(1000.0, 400.0, 2) == 600.0
    assert tpot_ms(1000.0, 400.0, 1) is None
    assert tpot_ms(1000.0, None, 4) is None


def test_tokens_are_counted_where_the_server_does_not_tell() -> None:
    last = json.loads(token("c", last=True)) | {"details": None}
    assert fed((0.1, token("a")), (0.2, token("")), (0.3, json.dumps(last))).tokens == 3


@pytest.mark.parametrize(
    ("events", "kind", "error_type"),
    [
        ([token("a")], "failed", "cut_off"),
        ([], "failed", "cut_off"),
        ([token("a"), "{}"], "failed", "broken_stream"),
        ([token("a"), "no json"], "failed", "broken_stream"),
        ([token("a"), '{"error": "x", "error_type": "generation"}'], "failed", "generation"),
        (['{"error": "x", "error_type": "overloaded"}'], "refused", "overloaded"),
    ],
)
def test_an_answer_that_is_not_whole_has_no_times(events: list[str], kind: str, error_type: str) -> None:
    reading = fed(*((0.1, event) for event in events))
    ended = outcome("code", reading, 0.0, 1.0, "")
    assert (ended.kind, ended.ttft_ms, ended.tpot_ms, ended.tokens) == (kind, None, None, 0)
    assert reading.fault is not None
    assert reading.fault.error_type == error_type


def test_an_error_after_the_last_event_counts_and_broken_utf8_is_a_fault() -> None:
    late = fed((0.1, token("a", last=True)), (0.2, '{"error": "x", "error_type": "generation"}'))
    assert outcome("code", late, 0.0, 1.0, "").kind == "failed"
    reading = Reading(read_tgi)
    reading.take(b'data:{"token": "\xff"}\n\n', 0.1)
    assert reading.fault == Fault(200, "broken_stream", "An event that is no UTF-8.")


def test_workers_tell_each_outcome_once_and_the_master_hears_them_all() -> None:
    first = Outcome("chat", "done", 5.0, 900.0, 300.0, 20.0, 31, "mixed")
    second = Outcome("code", "failed", 6.0, 10.0)
    worker, master = Tally(), Tally()
    for outcomes, lag_ms in (([first], 0.5), ([second], 1.5), ([], 2.5)):
        worker.outcomes += outcomes
        worker.lags_ms.append(lag_ms)
        report: dict[str, object] = {}
        worker.tell(report)
        master.hear(json.loads(json.dumps(report)))
    master.hear({})
    assert master.outcomes == [first, second]
    assert master.lags_ms == [0.5, 1.5, 2.5]


# Lengths


def test_the_chat_mix_has_sharegpts_means_a_low_median_and_a_tail() -> None:
    rng = Random(1)
    drawn = [CHAT.prompt.draw(rng, 10**9) for _ in range(40_000)]
    assert statistics.mean(drawn) == pytest.approx(161, rel=0.05)
    # 161 / (1 + 0.03 * 7) = 133.06, and the median of that log-normal is 133.06 * exp(-1/2) = 80.7.
    assert 78 <= statistics.median(drawn) <= 90
    assert 0.005 < sum(length > 1000 for length in drawn) / len(drawn) < 0.03
    answers = [CHAT.answer.draw(rng, 10**9) for _ in range(40_000)]
    assert statistics.mean(answers) == pytest.approx(338, rel=0.05)


def test_lengths_stay_within_their_bounds_and_scale() -> None:
    rng = Random(2)
    assert {LONG_PROMPT.prompt.draw(rng, 500) for _ in range(200)} == {500}
    assert min(CODE.answer.draw(rng, 4096) for _ in range(2000)) >= 4
    assert CODE.answer.draw(rng, 1) == 1
    assert CHAT.scaled(0.5).prompt.mean == 80.5
    assert Lengths(100, 0.0).mu == pytest.approx(math.log(100))


@pytest.mark.parametrize(
    ("most_input", "most_total"), [(4095, 4096), (1024, 2048), (100_000, 131_072), (64, 96)]
)
def test_prompts_and_answers_fit_the_server_with_room_to_spare(most_input: int, most_total: int) -> None:
    limits = Limits(most_input, most_total)
    prompt = limits.prompt_tokens
    assert 1 <= prompt <= most_input
    # A text may come out 15 % longer than it was estimated.
    assert prompt / 0.85 + limits.answer_tokens(prompt) <= max(most_total, prompt / 0.85 + 1)


def test_conversations_have_three_and_a_half_turns_on_average() -> None:
    rng = Random(3)
    drawn = [turns(rng) for _ in range(20_000)]
    assert min(drawn) == 1
    assert statistics.mean(drawn) == pytest.approx(3.5, rel=0.03)


# Texts


@pytest.mark.parametrize("make", [prose, question, code])
def test_texts_are_the_same_for_a_seed_and_differ_between_seeds(make: object) -> None:
    assert callable(make)
    assert make(Random(7), 900) == make(Random(7), 900)
    assert make(Random(7), 900)[:60] != make(Random(8), 900)[:60]


@pytest.mark.parametrize("characters", [1, 30, 200, 9000])
def test_prose_has_the_length_that_was_asked(characters: int) -> None:
    for make in (prose, question):
        text = make(Random(4), characters)
        assert 0 < len(text) <= characters
        assert len(text) > characters - 80
        assert text.isascii()


@pytest.mark.parametrize("characters", [20, 300, 5000])
def test_code_is_python_and_ends_with_a_function_to_complete(characters: int) -> None:
    text = code(Random(5), characters)
    assert len(text) <= max(characters, 120) + 10
    assert text.splitlines()[-2].startswith("def ")
    assert text.endswith('."""\n')
    assert not any(stop in text.rsplit("def ", 1)[1] for stop in CODE_STOPS)
