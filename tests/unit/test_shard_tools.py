"""Tools as a grammar and a prompt, and the text of a call as what a client gets."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.schemas import ChatRequest, Message, Tool
from orchestrator.embedded.shard.chat import asked_of
from orchestrator.embedded.shard.grammar import pattern_of
from orchestrator.embedded.shard.templates import TOOL_PROMPT, TemplateRefused, Templates, content_of
from orchestrator.embedded.shard.tools import (
    Call,
    CallStream,
    ToolError,
    grammar_of,
    next_id,
    offered,
    parse_call,
)
from orchestrator.errors import InvalidRequest
from tests.conftest import CHAT_TEMPLATE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "arguments": {"type": "object"}}}
TOOLS = [Tool.model_validate(WEATHER), Tool.model_validate(CLOCK)]


def names(choice: Any) -> list[str]:
    return [tool.function.name for tool in offered(TOOLS, choice)]


def test_the_choice_says_which_tools_are_offered() -> None:
    assert names(None) == names("auto") == ["get_weather", "clock", "no_tool"]
    assert names("required") == ["get_weather", "clock"]
    assert names("none") == []
    assert names("clock") == ["clock"]
    assert names({"type": "function", "function": {"name": "clock"}}) == ["clock"]
    with pytest.raises(ToolError, match=r"^Tool error: Tool with name nope not found$") as refused:
        names("nope")
    assert (refused.value.status, refused.value.error_type) == (422, "tool_error")
    for wrong in (3, {"type": "function"}, {"type": "magic", "function": {"name": "clock"}}):
        with pytest.raises(InvalidRequest, match="tool_choice"):
            names(wrong)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"function":{"_name":"get_weather","city":"Paris"}}', True),
        ('{ "function": { "_name": "get_weather", "city": "Paris", "unit": "f" } }', True),
        ('{"function":{"_name":"clock"}}', True),
        ('{"function":{"_name":"no_tool"}}', True),
        ("{}", False),
        ('{"function":{}}', False),
        ('{"function":{"_name":"get_weather"}}', False),
        ('{"function":{"_name":"get_weather","city":"Paris","unit":"k"}}', False),
        ('{"function":{"_name":"other"}}', False),
        ('{"function":{"_name":"clock"}}\n', False),
    ],
)
def test_the_grammar_takes_calls_of_the_offered_tools_and_nothing_else(text: str, fits: bool) -> None:
    pattern = pattern_of(grammar_of(offered(TOOLS, "auto")))
    assert bool(re.fullmatch(pattern, text)) is fits


def test_a_call_is_read_as_its_name_and_compact_arguments() -> None:
    text = '{ "function": { "_name": "f", "city": "S\u00e3o \\"P\\"", "n": [1, 2.50] } }'
    assert parse_call(text) == Call("f", '{"city":"S\u00e3o \\"P\\"","n":[1,2.5]}')
    assert parse_call('{"function":{"_name":"f"}}') == Call("f", "{}")


@pytest.mark.parametrize(
    "text", ["", '{"function":{"_na', "{}", '{"function":{}}', '{"function":3}', "[]", "3"]
)
def test_a_text_that_is_no_call_is_a_tool_error(text: str) -> None:
    with pytest.raises(ToolError, match=r"^Tool error: Failed to parse generated text: ") as refused:
        parse_call(text)
    assert refused.value.error_type == "tool_error"


def pieces(texts: list[str]) -> tuple[list[str | None], str, CallStream]:
    stream = CallStream()
    found = [piece for text in texts if (piece := stream.push(text)) is not None]
    return [piece.name for piece in found], "".join(piece.arguments for piece in found), stream


# Tokens and result of TGI's own test (router/src/chat.rs, test_chat_stream_tool_get_weather).
TGI_OPENING = ['{"', "function", '":', ' {"', "_", "name", '":', ' "']
TGI_NAME = ["get", "_current", "_weather", '",']
TGI_ARGUMENTS = [' "', "location", '":', ' "', "San", " Francisco", ",", " CA", '",', ' "', "format", '":']
TGI_ARGUMENTS += [' "', "c", "elsius", '"}}']


def test_tgis_own_stream_of_a_call_gives_tgis_pieces() -> None:
    names, arguments, _ = pieces(TGI_OPENING + TGI_NAME)
    assert (names, arguments) == (["get_current_weather"], "{")
    names, arguments, _ = pieces(TGI_OPENING + TGI_NAME + TGI_ARGUMENTS)
    assert names == ["get_current_weather", *[None] * 16]
    assert arguments == '{ "location": "San Francisco, CA", "format": "celsius"}'


def test_no_tool_yields_no_piece_and_is_known_with_its_name() -> None:
    names, _, stream = pieces([*TGI_OPENING, "no", "_tool"])
    assert not stream.talks
    names, _, stream = pieces([*TGI_OPENING, "no", "_tool", '",', ' "', "content"])
    assert names == []
    assert stream.talks
    assert pieces([*TGI_OPENING, "no", "_tool", '"}}'])[2].talks
    assert not pieces([*TGI_OPENING, "no", "_tool", "box", '"}}'])[2].talks


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8")), max_size=4
    ),
    st.lists(st.integers(0, 400)),
    st.sampled_from([(",", ":"), (" , ", " : ")]),
)
def test_however_a_call_is_cut_into_tokens_its_pieces_add_up_to_the_arguments(
    arguments: dict[str, str], cuts: list[int], separators: tuple[str, str]
) -> None:
    arguments = {key: value for key, value in arguments.items() if key != "_name"}
    call = {"function": {"_name": "f", **arguments}}
    text = json.dumps(call, separators=separators, ensure_ascii=False)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    names, found, _ = pieces([text[a:b] for a, b in pairwise(places)])
    assert names[0] == "f"
    assert set(names[1:]) <= {None}
    assert json.loads(found) == arguments


def test_the_next_call_is_numbered_after_the_earlier_ones() -> None:
    def message(*ids: str) -> Message:
        return Message(role="assistant", tool_calls=[{"id": i} for i in ids])

    assert next_id([Message(role="user", content="a")]) == "0"
    assert next_id([message("0", "4"), message("2")]) == "5"
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", next_id([message("call_1")]))


# --- the prompt ---


class Tokenizer:
    """Renders as transformers does, without loading one."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def apply_chat_template(self, messages: Any, **values: Any) -> str:
        from jinja2 import Environment

        assert values.pop("tokenize") is False
        return Environment().from_string(self.chat_template or "").render(messages=messages, **values)


USER = Message(role="user", content="hi")
KNOWS_TOOLS = "{% for t in tools %}[{{ t.function.arguments }}]{% endfor %}{{ messages[-1].content }}"
ARGUMENTS = (
    '{"type":"object","properties":{"city":{"type":"string"},"unit":{"enum":["c","f"]}},"required":["city"]}'
)


def test_a_template_without_tools_is_told_them_after_the_last_message() -> None:
    text = Templates(Tokenizer(CHAT_TEMPLATE)).prompt([USER], TOOLS[:1])
    listed = json.dumps(
        [
            {
                "type": "function",
                "function": {"description": "The weather", "name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
        separators=(",", ":"),
    )
    said = f"hi\n---\n{listed}\n{TOOL_PROMPT}"
    assert text == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_knows_tools_gets_them_and_only_the_tool_prompt_is_added() -> None:
    text = Templates(Tokenizer(KNOWS_TOOLS)).prompt([USER], TOOLS[:1], "Call one.")
    assert text == f"[{ARGUMENTS}]hi\n---\nCall one."


def test_a_chat_that_ends_with_the_assistant_is_continued() -> None:
    started = Message(role="assistant", content="One, two,")
    text = Templates(Tokenizer(CHAT_TEMPLATE)).prompt([USER, started])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOne, two,"


def test_earlier_calls_are_told_as_json_with_their_arguments_in_a_string() -> None:
    call = {"id": "0", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    assert content_of(Message(role="assistant", tool_calls=[call])) == (
        '[{"id":"0","type":"function","function":{"description":null,"name":"clock",'
        '"arguments":"{\\"zone\\":\\"UTC\\"}"}}]'
    )


@pytest.mark.parametrize(
    ("template", "sentence"), [(None, "template not found"), ("{{ messages.nope.x }}", "'nope'|nope")]
)
def test_a_template_that_refuses_is_a_template_error(template: str | None, sentence: str) -> None:
    with pytest.raises(TemplateRefused, match=f"^Template error: .*({sentence})") as refused:
        Templates(Tokenizer(template)).prompt([USER])
    assert (refused.value.status, refused.value.error_type) == (422, "template_error")


def chat(**changes: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | changes)


def test_tools_become_a_grammar_only_where_one_may_be_called() -> None:
    templates = Templates(Tokenizer(CHAT_TEMPLATE))
    plain, calls = asked_of(chat(), templates)
    assert not calls
    for body in (chat(tools=[WEATHER], tool_choice="none"), chat(tools=[], tool_choice="required")):
        assert asked_of(body, templates) == (plain, False)
    asked, calls = asked_of(chat(tools=[WEATHER], tool_choice="required"), templates)
    assert calls
    assert asked.parameters.grammar == grammar_of(TOOLS[:1])
    assert asked.inputs.startswith("<|im_start|>user\nhi\n---\n[")
    with pytest.raises(ToolError, match=r"^Tool error: Grammar and tools are mutually exclusive$"):
        asked_of(chat(tools=[], response_format={"type": "regex", "value": "a"}), templates)
