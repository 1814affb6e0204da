"""The built-in cases of `verify`: what is asked, and by which route."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.verify import texts

Body = Mapping[str, Any]


class Via(StrEnum):
    """The route a case is sent to."""

    GENERATE = "/generate"
    GENERATE_STREAM = "/generate_stream"
    CHAT = "/v1/chat/completions"
    CHAT_STREAM = "/v1/chat/completions (stream)"

    @property
    def path(self) -> str:
        return self.value.split(" ")[0]

    @property
    def streams(self) -> bool:
        return self in (Via.GENERATE_STREAM, Via.CHAT_STREAM)

    @property
    def chat(self) -> bool:
        return self in (Via.CHAT, Via.CHAT_STREAM)


class Prepare(StrEnum):
    """What must be found out from the reference before a case can be asked (see `prepare`)."""

    NOTHING = "nothing"
    LENGTH = "length"
    """Cut the passage to `prompt_tokens`."""
    STOP_FIRST = "stop_first"
    """Make the text of the first token a stop string."""
    STOP_LATER = "stop_later"
    """Make the text of a later token a stop string."""
    EOS_FIRST = "eos_first"
    """Find a prompt that the model answers with its end token alone."""
    SERVED = "served"
    """Leave it out where the reference refuses it: grammars can be switched off."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request.  `finish` and `generated` are what the answer must show, where that is known."""

    name: str
    via: Via
    body: Body
    prepare: Prepare = Prepare.NOTHING
    prompt_tokens: int = 0
    finish: str = ""
    generated: int | None = None
    whole: bool = False
    """Never split, so that no record is expected."""

    @property
    def greedy(self) -> bool:
        if self.via.chat:
            return self.body.get("temperature") == 0
        return not self.body["parameters"].get("do_sample", False)


def raw(name: str, inputs: str, new_tokens: int, *, via: Via = Via.GENERATE, **parameters: Any) -> Case:
    """A prompt sent as it is; greedy unless `do_sample` is given."""
    wanted = {"max_new_tokens": new_tokens, "details": True, **parameters}
    return Case(name, via, {"inputs": inputs, "parameters": wanted})


def chat(name: str, turns: list[str], new_tokens: int, *, via: Via = Via.CHAT, **options: Any) -> Case:
    """A conversation, user first and then alternating; greedy unless a temperature is given."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    if system := options.pop("system", None):
        messages.insert(0, {"role": "system", "content": system})
    body: dict[str, Any] = {
        "model": "tgi",
        "messages": messages,
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "logprobs": True,
        **options,
    }
    if via.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Case(name, via, body)


def prepared(case: Case, prepare: Prepare, *, prompt_tokens: int = 0) -> Case:
    """`case` with something to find out first."""
    return Case(case.name, case.via, case.body, prepare, prompt_tokens)


def built_in() -> tuple[Case, ...]:
    """All cases, the short ones first."""
    return (*_lengths(), *_scripts(), *_kinds(), *_chats(), *_sampled(), *_ends(), *_constrained())


def _lengths() -> list[Case]:
    stream = Via.GENERATE_STREAM
    return [
        raw("prompt of 1 token", "A", 12),
        raw("1 new token", texts.LIST, 1),
        raw("1 new token, stream", texts.STORY, 1, via=stream),
        raw("2 new tokens", texts.STORY, 2),
        raw("2 new tokens, stream", texts.LIST, 2, via=stream),
        raw("200 new tokens, stream", texts.STORY, 200, via=stream),
        prepared(raw("prompt of 17 tokens, stream", "", 9, via=stream), Prepare.LENGTH, prompt_tokens=17),
        prepared(raw("prompt of 300 tokens", "", 24), Prepare.LENGTH, prompt_tokens=300),
        prepared(
            raw("prompt of 2,000 tokens, stream", "", 16, via=stream), Prepare.LENGTH, prompt_tokens=2000
        ),
    ]


def _scripts() -> list[Case]:
    routes = (Via.GENERATE, Via.GENERATE_STREAM)
    return [
        raw(name, text, 14 + index, via=routes[index % 2])
        for index, (name, text) in enumerate(texts.SCRIPTS.items())
    ]


def _kinds() -> list[Case]:
    stream = Via.GENERATE_STREAM
    return [
        raw("emoji", texts.EMOJI, 20),
        raw("emoji, stream", texts.EMOJI, 23, via=stream),
        raw("scripts in one line, stream", texts.MIXED_SCRIPTS, 18, via=stream),
        raw("code, stream", texts.CODE, 40, via=stream),
        raw("json", texts.JSON_TEXT, 24),
        raw("top tokens", texts.STORY, 10, top_n_tokens=4),
        raw("top tokens, stream", texts.CODE, 10, via=stream, top_n_tokens=3),
        raw("full text", texts.LIST, 10, return_full_text=True),
        raw("white space", texts.WHITESPACE, 12),
        raw("repetition penalty", texts.REPETITIVE, 24, repetition_penalty=1.3),
    ]


def _chats() -> list[Case]:
    return [
        chat("chat", ["What is the capital of France?"], 24),
        chat("chat, stream", ["Name three colours of the rainbow."], 32, via=Via.CHAT_STREAM),
        chat(
            "chat of three turns, stream",
            ["I have four apples.", "That is a good start.", "I eat one. How many are left?"],
            28,
            via=Via.CHAT_STREAM,
            system="You answer in one short sentence.",
        ),
        chat("chat, 1 new token", ["Say yes or no: is ice cold?"], 1),
        chat("chat, top logprobs, stream", ["Count to five."], 16, via=Via.CHAT_STREAM, top_logprobs=3),
        chat("chat in Japanese", ["日本の首都はどこですか。"], 20),
    ]


def _sampled() -> list[Case]:
    stream = Via.GENERATE_STREAM
    everything = {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.15}
    return [
        raw("temperature", texts.STORY, 32, do_sample=True, temperature=0.8, seed=11),
        raw("top_k, stream", texts.LIST, 32, via=stream, do_sample=True, top_k=8, seed=2**53 - 1),
        raw("top_p", texts.STORY, 32, do_sample=True, top_p=0.7, seed=13),
        raw("all samplers, stream", texts.EMOJI, 32, via=stream, do_sample=True, seed=14, **everything),
        chat("chat, sampled", ["Invent a name for a grey cat."], 16, temperature=0.9, seed=15),
        chat(
            "chat, sampled, stream",
            ["Describe rain in six words."],
            20,
            via=Via.CHAT_STREAM,
            temperature=1.0,
            top_p=0.8,
            seed=16,
        ),
    ]


def _ends() -> list[Case]:
    stream = Via.GENERATE_STREAM
    return [
        prepared(raw("stop string", texts.STORY, 40), Prepare.STOP_LATER),
        prepared(raw("stop string, stream", texts.LIST, 40, via=stream), Prepare.STOP_LATER),
        prepared(raw("stop string at the first token", texts.LIST, 20), Prepare.STOP_FIRST),
        prepared(
            raw("stop string at the first token, stream", texts.STORY, 20, via=stream), Prepare.STOP_FIRST
        ),
        prepared(raw("end at the first token", "", 20), Prepare.EOS_FIRST),
        prepared(raw("end at the first token, stream", "", 20, via=stream), Prepare.EOS_FIRST),
    ]


SEASON = {
    "type": "object",
    "properties": {"season": {"enum": ["spring", "summer", "autumn", "winter"]}, "cold": {"type": "boolean"}},
    "required": ["season", "cold"],
}
CALL_TOKENS = 120
"""Enough for every call below: its arguments are chosen, not made up."""


def _constrained() -> list[Case]:
    """Grammars are split as all else; a chat with tools is served whole."""
    stream = Via.GENERATE_STREAM
    schema = {"type": "json", "value": SEASON}
    date = {"type": "regex", "value": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}
    chosen = {"type": "json_object", "value": SEASON}
    asked = ["In which season does snow fall here?"]
    cases = [
        raw("grammar: JSON schema", "A season as JSON:", 48, grammar=schema),
        raw("grammar: regex, stream", "The date of today:", 16, via=stream, grammar=date),
        raw("grammar: regex, sampled", "A date:", 16, grammar=date, do_sample=True, seed=17),
        chat("chat, response format", asked, 48, response_format=chosen),
    ]
    tools = [
        chat("chat, tool call", asked, CALL_TOKENS, tools=[_SEASON_TOOL], tool_choice="required"),
        chat(
            "chat, tool call, stream",
            asked,
            CALL_TOKENS,
            via=Via.CHAT_STREAM,
            tools=[_SEASON_TOOL],
            tool_choice="required",
        ),
    ]
    return [
        *(dataclasses.replace(case, prepare=Prepare.SERVED) for case in cases),
        *(dataclasses.replace(case, prepare=Prepare.SERVED, whole=True) for case in tools),
    ]


_SEASON_TOOL = {
    "type": "function",
    "function": {"name": "tell_season", "description": "Tells a season", "parameters": SEASON},
}
