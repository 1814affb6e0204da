"""Fit a case to the model at hand: cut its prompt to a length, find a stop string or a prompt that ends.

Everything is found out from the reference, so the separated pair meets each request for the first time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import httpx

from orchestrator.errors import Unreachable
from orchestrator.verify import texts
from orchestrator.verify.answer import Answer, Token
from orchestrator.verify.asking import NotTgi, ask_body, get_json, post_json
from orchestrator.verify.cases import Body, Case, Prepare, Via

PROBE_TOKENS = 12
SEEDS_TRIED = 96
ROOM_TOKENS = 8

COMPLETE_TURNS = (
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\nHello! How can I help you today?",
    "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\nTwo plus two is four.",
)
"""Conversations of the default model in which the assistant has said everything but its end token."""


class CannotPrepare(Exception):
    """The model offers nothing to build the case from; the text says what was tried."""


async def prepare(case: Case, reference: httpx.AsyncClient) -> Case:
    """`case`, ready to be asked.  CannotPrepare when this model gives no such request."""
    match case.prepare:
        case Prepare.NOTHING:
            return case
        case Prepare.LENGTH:
            return await _cut(case, reference)
        case Prepare.STOP_FIRST:
            return await _stop_first(case, reference)
        case Prepare.STOP_LATER:
            return await _stop_later(case, reference)
        case Prepare.EOS_FIRST:
            return await _end_first(case, reference)
        case Prepare.SERVED:
            return await _served(case, reference)


def _ready(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, prepare=Prepare.NOTHING, **changes)


def _with_parameters(body: Body, **parameters: Any) -> Body:
    return {**body, "parameters": {**body["parameters"], **parameters}}


# --- length -------------------------------------------------------------------------------------


async def _cut(case: Case, reference: httpx.AsyncClient) -> Case:
    info = await get_json(reference, "/info")
    new_tokens = case.body["parameters"]["max_new_tokens"]
    room = min(info["max_input_tokens"], info["max_total_tokens"] - new_tokens) - ROOM_TOKENS
    inputs = await passage_of(reference, min(case.prompt_tokens, room))
    return _ready(case, body={**case.body, "inputs": inputs})


async def passage_of(reference: httpx.AsyncClient, tokens: int) -> str:
    """The passage, repeated and cut after `tokens` tokens of the server's tokenizer."""
    chars = max(64, 2 * tokens)
    while True:
        text = (texts.PASSAGE * (chars // len(texts.PASSAGE) + 1))[:chars]
        found = await post_json(reference, "/tokenize", {"inputs": text})
        if len(found) >= tokens:
            return text[: found[tokens - 1]["stop"]]
        chars *= 2


# --- what may be switched off -------------------------------------------------------------------


async def _served(case: Case, reference: httpx.AsyncClient) -> Case:
    answer = await ask_body(reference, case.via, case.body)
    if 400 <= answer.status < 500:
        raise CannotPrepare(f"the reference refuses it: status {answer.status}, {answer.error}")
    return _ready(case)


# --- stop strings -------------------------------------------------------------------------------


async def _probe(case: Case, reference: httpx.AsyncClient) -> tuple[Token, ...]:
    body = _with_parameters(case.body, max_new_tokens=PROBE_TOKENS)
    return (await ask_body(reference, Via.GENERATE, body)).tokens


async def _stop_first(case: Case, reference: httpx.AsyncClient) -> Case:
    tokens = await _probe(case, reference)
    if not tokens or not _usable(tokens[0].text):
        raise CannotPrepare("the first token of the answer has no text of its own")
    body = _with_parameters(case.body, stop=[tokens[0].text])
    return _ready(case, body=body, finish="stop_sequence", generated=1)


async def _stop_later(case: Case, reference: httpx.AsyncClient) -> Case:
    said = ""
    for count, token in enumerate(await _probe(case, reference), start=1):
        said += token.text
        if count >= 3 and _usable(token.text) and said.find(token.text) == len(said) - len(token.text):
            body = _with_parameters(case.body, stop=[token.text, "\u2603 never said"])
            return _ready(case, body=body, finish="stop_sequence", generated=count)
    raise CannotPrepare("the answer has no later token that could be a stop string")


def _usable(text: str) -> bool:
    return bool(text) and "\ufffd" not in text


# --- the end token first ------------------------------------------------------------------------


async def _end_first(case: Case, reference: httpx.AsyncClient) -> Case:
    async for body in _candidates(case.body, reference):
        answer = await ask_body(reference, Via.GENERATE, _with_parameters(body, max_new_tokens=2))
        if _ended_at_first(answer):
            return _ready(case, body=body, finish="eos_token", generated=1)
    raise CannotPrepare("no prompt was found that this model answers with its end token alone")


def _ended_at_first(answer: Answer) -> bool:
    return answer.finish_reason == "eos_token" and answer.generated_tokens == 1


async def _candidates(body: Body, reference: httpx.AsyncClient) -> AsyncIterator[Body]:
    for prompt in COMPLETE_TURNS:
        yield {**body, "inputs": prompt}
    if templated := await _own_complete_turn(reference):
        yield {**body, "inputs": templated}
    for seed in range(SEEDS_TRIED):
        yield {**_with_parameters(body, do_sample=True, seed=seed), "inputs": texts.STORY}


async def _own_complete_turn(reference: httpx.AsyncClient) -> str | None:
    """The model's own whole answer in its own chat template, without the token that ended it."""
    messages = [{"role": "user", "content": "Answer with one word: what colour is snow?"}]
    request = {"model": "tgi", "messages": messages, "max_tokens": 48, "temperature": 0.0}
    answer = await ask_body(reference, Via.CHAT, request)
    if answer.finish_reason != "stop":
        return None
    try:
        templated = await post_json(reference, "/chat_tokenize", request)
    except (Unreachable, NotTgi):
        return None
    return str(templated["templated_text"]) + answer.text
