"""What travels in the benchmark: requests of the load, answers of the mock shards, and their check.

Token number i of every answer has the text ` t<i>`, so that a lost, doubled or reordered one shows.
A request says in its prompt how the mock is to pace the answer, for a prompt reaches the shard through
every gateway: `pace_us=5000` is one event every 5 ms, `hold_us=300000` keeps a whole answer back.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum

import orjson

MODEL = "bench"
FIRST_ID = 100
"""Token i has the id FIRST_ID + i."""
PROMPT_WORDS = 200
PROMPT_TOKENS = 212
"""What the mock says that it counted."""
DONE = b"data: [DONE]\n\n"

_CHAT_TEXT = re.compile(rb'"content":" t(\d+)"')
_TEXT = re.compile(rb'"text":" t(\d+)"')
_WHOLE_TEXT = re.compile(rb'"(?:content|text|generated_text)":"((?: t\d+)+)"')


class Route(StrEnum):
    """The dialect of a run."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"

    def path(self, stream: bool) -> str:
        """Where such a request is posted."""
        if self is Route.CHAT:
            return "/v1/chat/completions"
        if self is Route.COMPLETIONS:
            return "/v1/completions"
        return "/generate_stream" if stream else "/generate"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load."""

    route: Route
    stream: bool
    tokens: int
    pace_us: int = 0
    """Time of one decode step; 0: as fast as the other side reads."""
    hold_us: int = 0
    """How long the whole answer is kept back."""

    def body(self) -> bytes:
        """The JSON body, with a prompt of PROMPT_WORDS words."""
        prompt = f"pace_us={self.pace_us} hold_us={self.hold_us} " + "token " * (PROMPT_WORDS - 2)
        if self.route is Route.GENERATE:
            wanted = {"max_new_tokens": self.tokens, "details": False}
            return orjson.dumps({"inputs": prompt, "parameters": wanted})
        asked = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.route is Route.CHAT
            else {"prompt": prompt}
        )
        return orjson.dumps({"model": MODEL, **asked, "max_tokens": self.tokens, "stream": self.stream})

    def request(self, host: str) -> bytes:
        """The whole HTTP request."""
        body = self.body()
        head = (
            f"POST {self.route.path(self.stream)} HTTP/1.1\r\nhost: {host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def flaw(ask: Ask, body: bytes) -> str:
    """What is wrong with an answer's body, in a few words; empty for one that is whole."""
    if not ask.stream:
        found = _WHOLE_TEXT.search(body)
        numbers = [] if found is None else [int(text) for text in found[1].split(b" t")[1:]]
        return _flaw_of(numbers, ask.tokens)
    texts = _CHAT_TEXT if ask.route is Route.CHAT else _TEXT
    wrong = _flaw_of([int(number) for number in texts.findall(body)], ask.tokens)
    return wrong or _flaw_beside_tokens(ask, body)


def _flaw_beside_tokens(ask: Ask, body: bytes) -> str:
    if ask.route is Route.GENERATE:
        return "" if body.count(b'"generated_text":" t0') == 1 else "no generated_text at its end"
    if body.count(b'"model":"%b"' % MODEL.encode()) != ask.tokens:
        return "another model name"
    return "" if body.endswith(DONE) and body.count(DONE) == 1 else "no [DONE] at its end"


def _flaw_of(numbers: list[int], tokens: int) -> str:
    return "" if numbers == list(range(tokens)) else f"{len(numbers)} tokens, or not in order, for {tokens}"


# --- a shard's answers --------------------------------------------------------------------------


@functools.cache
def text_of(tokens: int) -> str:
    """The whole answer."""
    return "".join(f" t{index}" for index in range(tokens))


def chunk(piece: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Events:
    """The events of one streamed answer, each as one HTTP chunk; `model` is what the request named."""

    def __init__(self, route: Route, tokens: int, model: bytes) -> None:
        self.tokens = tokens
        self._route = route
        if route is Route.CHAT:
            self._start = (
                b'data: {"object":"chat.completion.chunk","id":"","created":1764460800,"model":"%b",'
                b'"system_fingerprint":"3.3.7-native","choices":[{"index":0,"delta":{"role":"assistant",'
                b'"content":" t' % model
            )
            self._end = b'"},"logprobs":null,"finish_reason":%b}],"usage":null}\n\n'
        elif route is Route.COMPLETIONS:
            self._start = (
                b'data: {"object":"text_completion","id":"","created":1764460800,'
                b'"choices":[{"index":0,"text":" t'
            )
            self._end = (
                b'","logprobs":null,"finish_reason":%%b}],"model":"%b",'
                b'"system_fingerprint":"3.3.7-native","usage":null}\n\n'
            ) % model

    def chunk(self, index: int) -> bytes:
        """Event number `index`."""
        last = index == self.tokens - 1
        if self._route is Route.GENERATE:
            whole = b'"%b"' % text_of(self.tokens).encode() if last else b"null"
            return chunk(
                b'data:{"index":%d,"token":{"id":%d,"text":" t%d","logprob":-0.5249023,"special":false},'
                b'"generated_text":%b,"details":null}\n\n' % (index + 1, FIRST_ID + index, index, whole)
            )
        unended = b"null" if self._route is Route.CHAT else b'""'
        reason = b'"length"' if last else unended
        return chunk(b"%b%d%b" % (self._start, index, self._end % reason))

    def ending(self) -> bytes:
        """What follows the last event: `[DONE]` where the route has it, and the end of the body."""
        return b"0\r\n\r\n" if self._route is Route.GENERATE else chunk(DONE) + b"0\r\n\r\n"


def whole_answer(route: Route, tokens: int, model: str, transfer: bool) -> bytes:
    """The body of an answer that is not streamed; `transfer` adds what vLLM's prefill tells its router."""
    text = text_of(tokens)
    if route is Route.GENERATE:
        return orjson.dumps({"generated_text": text})
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}
    usage["total_tokens"] = PROMPT_TOKENS + tokens
    said = {"message": {"role": "assistant", "content": text}} if route is Route.CHAT else {"text": text}
    answer: dict[str, object] = {
        "object": "chat.completion" if route is Route.CHAT else "text_completion",
        "id": "",
        "created": 1764460800,
        "model": model,
        "system_fingerprint": "3.3.7-native",
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}],
        "usage": usage,
    }
    if transfer:
        answer["kv_transfer_params"] = TRANSFER
    return orjson.dumps(answer)


TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_block_ids": list(range(14)),
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
