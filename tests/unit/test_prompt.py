"""Which bodies have the same prompt, and what its words are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import prompt
from orchestrator.core.redress import Dialect

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def parts(dialect: Dialect, raw: dict[str, Any]) -> list[bytes]:
    return list(prompt.parts(dialect, raw))


def tgi(inputs: str = "Hello", **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES} | fields


SAME: list[tuple[Dialect, dict[str, Any], dict[str, Any]]] = [
    (Dialect.TGI, {"inputs": "Hello"}, tgi()),
    (Dialect.TGI, tgi(), {"inputs": "Hello", "stream": True}),
    (
        Dialect.TGI,
        tgi(),
        tgi(
            best_of=1,
            temperature=0.5,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            top_k=3,
            top_p=0.9,
            typical_p=0.9,
            do_sample=True,
            max_new_tokens=9,
            return_full_text=True,
            stop=["x"],
            watermark=True,
            details=True,
            decoder_input_details=False,
            seed=7,
            top_n_tokens=2,
            grammar={"type": "regex", "value": "a"},
            ignore_eos_token=True,
        ),
    ),
    (Dialect.TGI, tgi(), tgi(truncate=None, adapter_id=None)),
    (Dialect.TGI, tgi(), tgi(adapter_id="")),
    (Dialect.TGI, tgi(truncate=5, adapter_id="a"), tgi(adapter_id="a", seed=1, truncate=5)),
    (
        Dialect.CHAT,
        chat(),
        chat(
            model="tgi",
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            seed=3,
            temperature=1,
            top_p=0.5,
            stop=["x"],
            frequency_penalty=1,
            presence_penalty=1,
            logit_bias=None,
            logprobs=True,
            top_logprobs=2,
            n=1,
            user="somebody",
            response_format={"type": "regex", "value": "a"},
        ),
    ),
    (Dialect.CHAT, chat(max_completion_tokens=9), chat(tools=None)),
    (Dialect.CHAT, chat(tool_prompt="x", model="m"), chat(model="m", tool_prompt="x")),
    (Dialect.COMPLETION, {"prompt": "Hello"}, {"prompt": ["Hello"], "max_tokens": 3, "seed": 2}),
    (Dialect.COMPLETION, {"prompt": "Hello"}, {"prompt": "Hello", "repetition_penalty": 2, "stop": ["x"]}),
]


@pytest.mark.parametrize(("dialect", "one", "other"), SAME)
def test_what_does_not_reach_the_prompt_changes_nothing(
    dialect: Dialect, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert parts(dialect, one) == parts(dialect, other)


DIFFERENT: list[tuple[Dialect, list[dict[str, Any]]]] = [
    (
        Dialect.TGI,
        [
            tgi(),
            tgi("Hello "),
            tgi("hello"),
            tgi(truncate=5),
            tgi(truncate=6),
            tgi(unknown=6),
            tgi(adapter_id="a"),
            tgi(adapter_id="b"),
            tgi(adapter_id="a", truncate=5),
            tgi(add_special_tokens=False),
            tgi(add_special_tokens=True),
        ],
    ),
    (
        Dialect.CHAT,
        [
            chat(),
            chat(messages=MESSAGES[1:]),
            chat(messages=MESSAGES[::-1]),
            chat(messages=[MESSAGES[0], {"role": "assistant", "content": "Hello"}]),
            chat(messages=[MESSAGES[0], {"role": "user", "content": "Hello", "name": "x"}]),
            chat(messages=[MESSAGES[0], {"role": "user", "tool_calls": [{"a": 1, "b": 2}]}]),
            chat(messages=[MESSAGES[0], {"role": "user", "tool_calls": [{"b": 2, "a": 1}]}]),
            chat(model="mine"),
            chat(tools=[]),
            chat(tool_prompt="x"),
            chat(tool_choice="none"),
            chat(guideline="x"),
            chat(chat_template_kwargs={"enable_thinking": False}),
            chat(continue_final_message=True),
            chat(add_generation_prompt=False),
            chat(documents=[]),
        ],
    ),
    (
        Dialect.COMPLETION,
        [
            {"prompt": "Hello"},
            {"prompt": "Hello!"},
            {"prompt": "Hello", "model": "m"},
            {"prompt": "H", "echo": True},
        ],
    ),
]


@pytest.mark.parametrize(("dialect", "bodies"), DIFFERENT)
def test_what_may_reach_the_prompt_makes_another_one(dialect: Dialect, bodies: list[dict[str, Any]]) -> None:
    assert len({tuple(parts(dialect, body)) for body in bodies}) == len(bodies)


def test_raw_text_is_the_same_prompt_on_either_route_and_a_chat_never_is() -> None:
    completion = parts(Dialect.COMPLETION, {"prompt": "Hello", "model": "lora"})
    assert parts(Dialect.TGI, tgi(adapter_id="lora")) == completion
    assert parts(Dialect.CHAT, chat(model="lora")) != completion


@given(st.text(), st.text(), st.text(), st.text())
def test_text_and_adapter_are_not_mixed_up(text: str, adapter: str, other: str, another: str) -> None:
    def of(inputs: str, name: str) -> list[bytes]:
        return parts(Dialect.TGI, tgi(inputs, adapter_id=name))

    text, adapter, other, another = (
        part.encode("utf-8", "ignore").decode() for part in (text, adapter, other, another)
    )
    assert (of(text, adapter) == of(other, another)) == ((text, adapter) == (other, another))


def test_long_prompts_that_begin_alike_have_one_prefix() -> None:
    def of(words: str, **parameters: Any) -> int:
        return prompt.prefix(Dialect.TGI, tgi(words, **parameters), words)

    long = "word " * 205  # 1025 characters
    assert 0 < of(long) < 2**64
    assert of(long) == of(long + "and something else") == of(long, seed=3)
    assert of(long) not in (of("x" + long), of(long, adapter_id="lora"))
    assert of(long[:1023]) == 0


def test_words_of_each_kind_of_body() -> None:
    assert prompt.text(Dialect.TGI, tgi("one two")) == "one two"
    assert prompt.text(Dialect.COMPLETION, {"prompt": "one two"}) == "one two"
    assert prompt.text(Dialect.COMPLETION, {"prompt": ["one two"]}) == "one two"
    chunks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    said = [
        {"role": "system", "content": "zero"},
        {"role": "user", "content": chunks},
        {"role": "assistant", "tool_calls": [{"id": "0"}]},
        {"role": "user", "content": None, "tool_calls": []},
    ]
    assert prompt.text(Dialect.CHAT, {"messages": said}).split() == ["zero", "one", "two"]
