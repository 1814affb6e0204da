"""Bodies out and events back, for each route."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from orchestrator.core import redress
from orchestrator.core.redress import Dialect
from orchestrator.core.sse import Event
from orchestrator.core.validation import GenerateParameters
from tgi_patches.contract import GetTag, PutTag, parse_tag

HANDLE = "0123456789abcdef" * 2
TAG = f"|kv1:get:p0.5:{HANDLE}:7"


def tgi_event(**fields: Any) -> dict[str, Any]:
    token = {"id": 7, "text": "Hi", "logprob": -0.1, "special": False}
    return {"index": 1, "token": token, "generated_text": None, "details": None} | fields


def chat_event(content: str = "Hi", reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": reason}
    return {"id": "", "model": TAG, "choices": [choice], "usage": None} | fields


def put(dialect: Dialect, raw: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    return redress.put_body(dialect, raw, redress.put_tag(dialect, raw, HANDLE), seed)


def get(dialect: Dialect, raw: dict[str, Any], **options: Any) -> dict[str, Any]:
    tag = redress.get_tag(dialect, raw, handle=HANDLE, shard="p0", epoch=5, first=options.pop("first", 7))
    return redress.get_body(dialect, raw, tag, options.get("seed"), options.get("cap"))


# --- bodies -------------------------------------------------------------------------------------


def test_put_body_of_generate() -> None:
    raw = {"inputs": "x", "parameters": {"max_new_tokens": 50, "temperature": 0.5, "stop": ["a"]}}
    assert put(Dialect.TGI, raw) == {
        "inputs": "x",
        "parameters": {
            "max_new_tokens": 1,
            "temperature": 0.5,
            "stop": ["a"],
            "details": True,
            "adapter_id": f"|kv1:put:{HANDLE}",
        },
    }
    assert raw["parameters"] == {"max_new_tokens": 50, "temperature": 0.5, "stop": ["a"]}


def test_absent_parameters_still_sample_on_both_legs() -> None:
    assert put(Dialect.TGI, {"inputs": "x"}, seed=3)["parameters"] == {
        "do_sample": True,
        "seed": 3,
        "max_new_tokens": 1,
        "details": True,
        "adapter_id": f"|kv1:put:{HANDLE}",
    }
    got = get(Dialect.TGI, {"inputs": "x"}, seed=3)["parameters"]
    assert got == {"do_sample": True, "seed": 3, "adapter_id": TAG}


def test_empty_parameters_stay_greedy() -> None:
    assert "do_sample" not in put(Dialect.TGI, {"inputs": "x", "parameters": {}})["parameters"]
    assert get(Dialect.TGI, {"inputs": "x", "parameters": {}})["parameters"] == {"adapter_id": TAG}


def test_get_body_of_generate_is_the_true_request() -> None:
    raw = {"inputs": "x", "unknown": 1, "parameters": {"max_new_tokens": 50, "adapter_id": "lora", "odd": 2}}
    body = get(Dialect.TGI, raw)
    assert body == {
        "inputs": "x",
        "unknown": 1,
        "parameters": {"max_new_tokens": 50, "adapter_id": "lora" + TAG, "odd": 2},
    }
    assert parse_tag(body["parameters"]["adapter_id"]) == GetTag(HANDLE, "p0", 5, 7, "lora")


def test_unknown_first_token_is_a_dash() -> None:
    body = get(Dialect.TGI, {"inputs": "x", "parameters": {}}, first=None)
    assert body["parameters"]["adapter_id"] == f"|kv1:get:p0.5:{HANDLE}:-"


def test_legs_of_a_chat() -> None:
    raw = {"messages": [], "model": "mine", "max_completion_tokens": 9, "stream": True, "odd": 1}
    assert put(Dialect.CHAT, raw, seed=4) == {
        "messages": [],
        "model": f"mine|kv1:put:{HANDLE}",
        "max_tokens": 1,
        "stream": True,
        "odd": 1,
        "seed": 4,
    }
    assert get(Dialect.CHAT, raw, seed=4) == raw | {"model": "mine" + TAG, "seed": 4}


@pytest.mark.parametrize("raw", [{}, {"model": "tgi"}, {"model": None}])
def test_chat_without_an_adapter(raw: dict[str, Any]) -> None:
    assert redress.put_tag(Dialect.CHAT, raw, HANDLE) == PutTag(HANDLE, "")
    assert redress.put_tag(Dialect.CHAT, raw, HANDLE, pinned=True) == PutTag(HANDLE, "", pinned=True)


def test_cap_replaces_the_length_in_every_spelling() -> None:
    generate = {"inputs": "x", "parameters": {"max_new_tokens": 50}}
    assert get(Dialect.TGI, generate, cap=8)["parameters"]["max_new_tokens"] == 8
    assert redress.whole_body(Dialect.TGI, generate, 8)["parameters"] == {"max_new_tokens": 8}
    chat = {"messages": [], "max_completion_tokens": 50}
    assert redress.whole_body(Dialect.CHAT, chat, 8) == {"messages": [], "max_tokens": 8}
    assert "max_completion_tokens" not in get(Dialect.CHAT, chat, cap=8)
    assert redress.whole_body(Dialect.CHAT, chat, None) == chat


def test_whole_body_of_absent_parameters_samples_also_under_a_cap() -> None:
    capped = redress.whole_body(Dialect.TGI, {"inputs": "x"}, 8)
    assert capped["parameters"] == {"do_sample": True, "max_new_tokens": 8}


@pytest.mark.parametrize(
    ("dialect", "raw", "tagged"),
    [
        (Dialect.TGI, {"inputs": "x"}, False),
        (Dialect.TGI, {"inputs": "|kv", "parameters": {"adapter_id": "a"}}, False),
        (Dialect.TGI, {"inputs": "x", "parameters": {"adapter_id": "a|kv"}}, True),
        (Dialect.TGI, {"inputs": "x", "parameters": {"adapter_id": None}}, False),
        (Dialect.CHAT, {"model": "a|kv1:put:0"}, True),
        (Dialect.CHAT, {"model": "a"}, False),
        (Dialect.CHAT, {}, False),
    ],
)
def test_tag_of_a_client_is_found(dialect: Dialect, raw: dict[str, Any], tagged: bool) -> None:
    assert (redress.client_tag(dialect, raw) is not None) is tagged


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, True),
        ({"tools": True}, False),
        ({"images": True}, False),
        ({"choices": 2}, False),
        ({"parameters": GenerateParameters(best_of=2)}, False),
        ({"parameters": GenerateParameters(best_of=1)}, True),
        ({"parameters": GenerateParameters(decoder_input_details=True)}, False),
    ],
)
def test_what_may_be_split(options: dict[str, Any], splits: bool) -> None:
    asked = {"parameters": GenerateParameters(), "tools": False, "images": False} | options
    assert redress.may_split(asked.pop("parameters"), **asked) is splits


# --- the first token ----------------------------------------------------------------------------


def first(dialect: Dialect, event: dict[str, Any], **options: Any) -> redress.FirstToken:
    values = {"max_new_tokens": 20, "wants_details": True, "model": "mine"} | options
    return redress.first_token(dialect, event, **values)


ENDING = {"finish_reason": "length", "generated_tokens": 1, "seed": None, "input_length": 3}


def test_length_after_one_token_is_no_ending() -> None:
    seen = first(Dialect.TGI, tgi_event(generated_text="Hi", details=ENDING))
    assert seen == redress.FirstToken(tgi_event(), 7, "Hi", False)


@pytest.mark.parametrize("reason", ["eos_token", "stop_sequence"])
@pytest.mark.parametrize("wants_details", [True, False])
def test_true_ending_keeps_its_text_and_details_only_where_wanted(reason: str, wants_details: bool) -> None:
    details = ENDING | {"finish_reason": reason}
    event = tgi_event(generated_text="Hi", details=details)
    seen = first(Dialect.TGI, event, wants_details=wants_details)
    assert seen.ended is True
    assert seen.event == event | {"details": details if wants_details else None}


def test_request_for_one_token_ends_with_length() -> None:
    seen = first(Dialect.TGI, tgi_event(generated_text="Hi", details=ENDING), max_new_tokens=1)
    assert seen.ended is True
    assert seen.event["generated_text"] == "Hi"


def test_top_tokens_of_the_first_step_are_kept() -> None:
    event = tgi_event(generated_text="Hi", details=ENDING, top_tokens=[{"id": 8}])
    assert first(Dialect.TGI, event).event["top_tokens"] == [{"id": 8}]


def test_first_chunk_of_a_chat_goes_on_under_the_clients_model() -> None:
    seen = first(Dialect.CHAT, chat_event(reason="length"))
    assert seen == redress.FirstToken(chat_event(model="mine"), None, "Hi", False)


@pytest.mark.parametrize("reason", ["stop", "stop_sequence"])
def test_chat_that_ended_says_so(reason: str) -> None:
    seen = first(Dialect.CHAT, chat_event(reason=reason))
    assert seen.ended is True
    assert seen.event["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("dialect", "event", "token"),
    [
        (Dialect.TGI, tgi_event(), True),
        (Dialect.TGI, {"error": "x"}, False),
        (Dialect.TGI, {}, False),
        (Dialect.TGI, {"token": None}, False),
        (Dialect.CHAT, chat_event(), True),
        (Dialect.CHAT, chat_event(content=""), True),
        (Dialect.CHAT, {"choices": [], "usage": {"prompt_tokens": 1}}, False),
        (Dialect.CHAT, {"choices": [{"delta": {"role": "assistant"}}]}, False),
        (Dialect.CHAT, {"choices": [{"delta": {"tool_calls": []}}]}, True),
        (Dialect.CHAT, {}, False),
    ],
)
def test_which_events_are_tokens(dialect: Dialect, event: dict[str, Any], token: bool) -> None:
    assert redress.is_token(dialect, event) is token


def test_same_token_is_told_by_id_or_by_text() -> None:
    sent = first(Dialect.TGI, tgi_event(generated_text="Hi", details=ENDING))
    assert redress.same_token(Dialect.TGI, tgi_event(), sent)
    assert not redress.same_token(Dialect.TGI, tgi_event(token={"id": 8, "text": "Hi"}), sent)
    chat = first(Dialect.CHAT, chat_event())
    assert redress.same_token(Dialect.CHAT, chat_event(), chat)
    assert not redress.same_token(Dialect.CHAT, chat_event("Ho"), chat)


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pretty", [False, True])
def test_last_event_is_recognised_however_it_is_written(pretty: bool) -> None:
    option = orjson.OPT_INDENT_2 if pretty else 0

    def last(dialect: Dialect, event: dict[str, Any]) -> bool:
        return redress.ends(dialect, orjson.dumps(event, option=option)) > 0

    tricky = tgi_event(token={"id": 1, "text": '"generated_text":"x"'})
    assert not last(Dialect.TGI, tgi_event())
    assert not last(Dialect.TGI, tricky)
    assert last(Dialect.TGI, tgi_event(generated_text=""))
    assert last(Dialect.TGI, tgi_event(generated_text='"generated_text":null'))
    assert not last(Dialect.CHAT, chat_event())
    assert last(Dialect.CHAT, chat_event(reason="length"))
    assert last(Dialect.CHAT, chat_event(content='"finish_reason":null', reason="stop"))
    assert not last(Dialect.CHAT, {"choices": [], "usage": {}})


def test_done_is_not_the_last_token() -> None:
    assert redress.ends(Dialect.CHAT, b"[DONE]") == 0


def test_tgis_events_pass_untouched() -> None:
    event = Event(b"data: {}\r\n\r\n", b"{}")
    assert redress.relayed(Dialect.TGI, event, TAG, "mine") == b"data: {}\r\n\r\n"


def test_chats_events_pass_under_the_clients_model() -> None:
    data = orjson.dumps(chat_event())
    relayed = redress.relayed(Dialect.CHAT, Event(b"data:" + data + b"\n\n", data), TAG, 'my "own"')
    assert relayed.startswith(b"data: ")
    assert orjson.loads(relayed[6:]) == chat_event(model='my "own"')
    done = Event(b"data: [DONE]\n\n", b"[DONE]")
    assert redress.relayed(Dialect.CHAT, done, TAG, "mine") == b"data: [DONE]\n\n"


def test_indented_chunk_becomes_one_line() -> None:
    data = orjson.dumps(chat_event("two\nlines"), option=orjson.OPT_INDENT_2)
    relayed = redress.relayed(Dialect.CHAT, Event(b"", data), TAG, "mine")
    assert relayed.count(b"\n") == 2
    assert orjson.loads(relayed[6:]) == chat_event("two\nlines", model="mine")


@pytest.mark.parametrize("name", ["modèle", "a/b", "🦊"])
def test_model_is_put_back_also_where_it_is_escaped(name: str) -> None:
    import json

    tag = f"{name}|kv1:put:{HANDLE}"
    for data in (orjson.dumps({"model": tag}), json.dumps({"model": tag}).encode()):
        assert orjson.loads(redress.put_back_model(data, tag, name)) == {"model": name}


def test_text_about_tags_is_left_alone() -> None:
    event = chat_event(content=f'"{TAG}" and {TAG}')
    restored = orjson.loads(redress.put_back_model(orjson.dumps(event), TAG, "mine"))
    assert restored == event | {"model": "mine"}


def test_only_the_end_repeats_no_text() -> None:
    event = tgi_event(generated_text="Hi", details=ENDING)
    ending = redress.only_the_end(Dialect.TGI, event, "")
    assert ending == event | {"token": event["token"] | {"text": ""}}
    chat = redress.only_the_end(Dialect.CHAT, chat_event(reason="stop"), "mine")
    assert chat == chat_event(content="", reason="stop", model="mine")


def test_answer_that_ended_at_its_first_token() -> None:
    answer = {"generated_text": "Hi", "details": ENDING}
    assert redress.ended_answer(Dialect.TGI, answer, wants_details=True, model="") == answer
    assert redress.ended_answer(Dialect.TGI, answer, wants_details=False, model="") == {
        "generated_text": "Hi"
    }
    chat = {"model": TAG, "choices": []}
    assert redress.ended_answer(Dialect.CHAT, chat, wants_details=False, model="mine") == {
        "model": "mine",
        "choices": [],
    }


def test_counts_of_whole_answers() -> None:
    assert redress.generated_tokens(Dialect.TGI, {"details": {"generated_tokens": 4}}) == 4
    assert redress.generated_tokens(Dialect.TGI, {"generated_text": "x"}) is None
    assert redress.generated_tokens(Dialect.CHAT, {"usage": {"completion_tokens": 5}}) == 5


@pytest.mark.parametrize(
    ("reason", "limit", "ended"),
    [("length", 2, False), ("length", 1, True), ("eos_token", 9, True), ("stop", 9, True), (None, 9, False)],
)
def test_when_the_first_token_was_the_last(reason: str | None, limit: int, ended: bool) -> None:
    assert redress.ended_at_first(reason, limit) is ended


# --- completions --------------------------------------------------------------------------------


def piece(text: str = "Hi", reason: str = "", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return {"object": "text_completion", "id": "", "model": "served", "choices": [choice]} | fields


COUNTED = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def test_legs_of_a_completion_carry_their_tags_in_model() -> None:
    raw = {"prompt": "x", "model": "mine", "max_tokens": 9, "echo": True}
    assert put(Dialect.COMPLETION, raw, seed=4) == raw | {
        "model": f"mine|kv1:put:{HANDLE}",
        "max_tokens": 1,
        "seed": 4,
    }
    assert get(Dialect.COMPLETION, raw, seed=4) == raw | {"model": "mine" + TAG, "seed": 4}
    assert get(Dialect.COMPLETION, raw, cap=8)["max_tokens"] == 8


@pytest.mark.parametrize("raw", [{}, {"model": "tgi"}, {"model": None}])
def test_completion_without_an_adapter(raw: dict[str, Any]) -> None:
    assert redress.put_tag(Dialect.COMPLETION, raw, HANDLE) == PutTag(HANDLE, "")


def test_first_piece_loses_its_count_and_its_reason() -> None:
    seen = first(Dialect.COMPLETION, piece(reason="length", usage=COUNTED))
    assert seen == redress.FirstToken(piece(), None, "Hi", False)


@pytest.mark.parametrize("reason", ["eos_token", "stop_sequence"])
def test_completion_that_ended_keeps_both(reason: str) -> None:
    event = piece(reason=reason, usage=COUNTED)
    assert first(Dialect.COMPLETION, event) == redress.FirstToken(event, None, "Hi", True)


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETION])
@pytest.mark.parametrize(("told", "named"), [(TAG, "mine"), ("served", "served")])
def test_only_our_tag_is_replaced_by_the_clients_name(dialect: Dialect, told: str, named: str) -> None:
    event = (chat_event if dialect is Dialect.CHAT else piece)(reason="stop", model=told)
    assert first(dialect, event).event["model"] == named
    assert redress.only_the_end(dialect, event, "mine")["model"] == named
    assert redress.ended_answer(dialect, event, wants_details=False, model="mine")["model"] == named
    data = orjson.dumps(event)
    assert orjson.loads(redress.relayed_answer(dialect, data, TAG, "mine"))["model"] == named


def test_pieces_are_the_same_token_when_they_say_the_same() -> None:
    sent = first(Dialect.COMPLETION, piece(""))
    assert redress.same_token(Dialect.COMPLETION, piece(""), sent)
    assert not redress.same_token(Dialect.COMPLETION, piece("Ho"), sent)


def test_end_of_a_completion_without_its_text_still_counts() -> None:
    event = piece(reason="eos_token", usage=COUNTED)
    ending = piece("", reason="eos_token", usage=COUNTED)
    assert redress.only_the_end(Dialect.COMPLETION, event, "mine") == ending


@pytest.mark.parametrize(
    ("event", "token"), [(piece(""), True), ({"choices": []}, False), ({"error": {"message": "x"}}, False)]
)
def test_which_events_of_a_completion_are_tokens(event: dict[str, Any], token: bool) -> None:
    assert redress.is_token(Dialect.COMPLETION, event) is token


def test_reason_of_a_completion_is_none_while_it_is_empty() -> None:
    assert redress.finish_reason(Dialect.COMPLETION, piece()) is None
    assert redress.finish_reason(Dialect.COMPLETION, piece(reason="length")) == "length"
    assert redress.generated_tokens(Dialect.COMPLETION, piece(usage=COUNTED)) == 1


# --- what a relay asks for every event ----------------------------------------------------------


SERDE = {
    Dialect.TGI: b'{"index":1,"token":{"id":7,"text":"%s","logprob":-0.1,"special":false},'
    b'"generated_text":null,"details":null}',
    Dialect.CHAT: b'{"object":"chat.completion.chunk","id":"","created":1,"model":"m",'
    b'"system_fingerprint":"f","choices":[{"index":0,"delta":{"role":"assistant","content":"%s"},'
    b'"logprobs":null,"finish_reason":null}],"usage":null}',
    Dialect.COMPLETION: b'{"object":"text_completion","id":"","created":1,"choices":[{"index":0,"text":"%s",'
    b'"logprobs":null,"finish_reason":""}],"model":"m","system_fingerprint":"f"}',
}
"""Token events as the router of TGI v3.3.7 writes them: the order of its structs' fields."""


@pytest.mark.parametrize("dialect", list(Dialect))
def test_pattern_stands_in_tgis_token_events_and_in_no_text(dialect: Dialect) -> None:
    pattern = redress.going_on(dialect)
    assert pattern in SERDE[dialect] % b"a"
    assert redress.ends(dialect, SERDE[dialect] % b"a") == 0
    said = orjson.dumps(pattern.decode())[1:-1]
    last = SERDE[dialect].replace(pattern, pattern.rpartition(b":")[0] + b':"length"') % said
    assert pattern not in last
    assert redress.ends(dialect, last) == 1


@pytest.mark.parametrize("dialect", list(Dialect))
def test_what_ends_nothing(dialect: Dialect) -> None:
    assert redress.ends(dialect, b"[DONE]") == 0
    assert redress.ends(dialect, b'{"choices":[],"usage":{"prompt_tokens":1}}') == 0
    assert redress.ends(dialect, b'{"error":"x","error_type":"generation"}') == 0


@pytest.mark.parametrize("data", [b"{oops", b"[]", b"3", b""])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_what_is_no_event_cannot_be_read(dialect: Dialect, data: bytes) -> None:
    with pytest.raises(ValueError):
        redress.ends(dialect, data)


def test_error_inside_a_stream_has_the_shape_of_its_route() -> None:
    told = ("out of memory", 424, "generation")
    assert redress.error_event(Dialect.TGI, *told) == {"error": "out of memory", "error_type": "generation"}
    for dialect in (Dialect.CHAT, Dialect.COMPLETION):
        assert redress.error_event(dialect, *told) == {
            "error": {"message": "out of memory", "http_status_code": 424},
            "error_type": "generation",
        }
