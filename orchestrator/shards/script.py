"""What a fake shard says: TGI's events and answers over a list of texts, one a token.  Pure.

The shapes follow the router of TGI v3.3.7 (lib.rs, chat.rs, `completions` in server.rs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.core.redress import Dialect
from tgi_patches.contract import GetTag, Limits, PutTag, parse_tag

SERVED = "fake"
"""The model that answers name where nothing else is asked for."""
_TOLD_LIMITS = (
    "max_concurrent_requests",
    "max_best_of",
    "max_stop_sequences",
    "max_input_tokens",
    "max_total_tokens",
    "max_client_batch_size",
)
_DIALECTS = {"/v1/chat/completions": Dialect.CHAT, "/v1/completions": Dialect.COMPLETION}


class Part(StrEnum):
    """What a request to a shard is."""

    PUT = "put"
    GET = "get"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation request, understood."""

    dialect: Dialect
    stream: bool
    part: Part
    model: str
    max_new_tokens: int
    details: bool
    usage: bool
    seed: int | None
    prompts: int = 1


def understood(path: str, body: Mapping[str, Any]) -> Ask:
    """A body that was sent to `path`."""
    dialect = _DIALECTS.get(path, Dialect.TGI)
    openai = dialect is not Dialect.TGI
    parameters = body if openai else body.get("parameters", {})
    tag = parse_tag(parameters.get("model" if openai else "adapter_id"))
    parts: dict[type, Part] = {PutTag: Part.PUT, GetTag: Part.GET}
    spellings = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    wanted = next((parameters[name] for name in spellings if parameters.get(name) is not None), 1000)
    prompt = body.get("prompt")
    return Ask(
        dialect=dialect,
        stream=bool(body.get("stream")) if openai else path == "/generate_stream",
        part=parts.get(type(tag), Part.PLAIN),
        model=body.get("model") or SERVED,
        max_new_tokens=wanted,
        details=bool(parameters.get("details")),
        usage=bool((parameters.get("stream_options") or {}).get("include_usage")),
        seed=parameters.get("seed"),
        prompts=len(prompt) if isinstance(prompt, list) else 1,
    )


def info(limits: Limits) -> dict[str, Any]:
    """What `/info` says."""
    told = dataclasses.asdict(limits)
    named = {name: told[name] for name in _TOLD_LIMITS}
    router = {"router": "fake", "version": "0", "sha": None, "docker_label": None}
    model = {"model_id": SERVED, "model_sha": None, "model_pipeline_tag": "text-generation"}
    return model | named | {"validation_workers": 1} | router


@dataclass(frozen=True, slots=True)
class Script:
    """A whole answer, token by token.  `count` below is how many of its tokens are said."""

    tokens: tuple[str, ...]
    end: str
    prompt_tokens: int
    first_id: int
    echoes_model: bool
    """Whether completions name the model that was asked for; TGI's name the served one."""

    def event(self, ask: Ask, index: int, *, last: bool, prompt: int = 0) -> dict[str, Any]:
        """Token number `index` (from 0) as the route's stream tells it."""
        if ask.dialect is Dialect.TGI:
            return self._token_event(ask, index, last=last)
        if ask.dialect is Dialect.CHAT:
            return self._chunk(ask, index, last=last)
        return self._piece(ask, index, last=last, prompt=prompt)

    def counted(self, ask: Ask, count: int) -> dict[str, Any]:
        """The chunk that only counts, at the end of a chat that asked for it."""
        return self._frame(ask, "chat.completion.chunk") | {"choices": [], "usage": self._usage(count)}

    def whole(self, ask: Ask, count: int) -> dict[str, Any]:
        """The answer that is no stream."""
        if ask.dialect is Dialect.TGI:
            return self._response(ask, count)
        return self._completion(ask, count)

    def _reason(self, count: int, *, openai: bool) -> str:
        reason = "length" if count < len(self.tokens) else self.end
        return "stop" if openai and reason == "eos_token" else reason

    def _token(self, index: int) -> dict[str, Any]:
        return {"id": self.first_id + index, "text": self.tokens[index], "logprob": -0.5, "special": False}

    def _text(self, count: int) -> str:
        return "".join(self.tokens[:count])

    def _usage(self, count: int, prompts: int = 1) -> dict[str, int]:
        prompt, said = self.prompt_tokens * prompts, count * prompts
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    def _frame(self, ask: Ask, kind: str) -> dict[str, Any]:
        echoed = ask.dialect is Dialect.CHAT or self.echoes_model
        named = ask.model if echoed and ask.model != "tgi" else SERVED
        return {"object": kind, "id": "", "created": 1, "system_fingerprint": "fake", "model": named}

    def _token_event(self, ask: Ask, index: int, *, last: bool) -> dict[str, Any]:
        ended = {"finish_reason": self._reason(index + 1, openai=False), "generated_tokens": index + 1}
        details = ended | {"seed": ask.seed, "input_length": self.prompt_tokens}
        return {
            "index": index + 1,
            "token": self._token(index),
            "generated_text": self._text(index + 1) if last else None,
            "details": details if last and ask.details else None,
        }

    def _chunk(self, ask: Ask, index: int, *, last: bool) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": self.tokens[index]},
            "logprobs": None,
            "finish_reason": self._reason(index + 1, openai=True) if last else None,
        }
        return self._frame(ask, "chat.completion.chunk") | {"choices": [choice], "usage": None}

    def _piece(self, ask: Ask, index: int, *, last: bool, prompt: int) -> dict[str, Any]:
        # TGI's stream of completions says `eos_token` where its whole answer says `stop`.
        reason = self._reason(index + 1, openai=False) if last else ""
        choice = {"index": prompt, "text": self.tokens[index], "logprobs": None, "finish_reason": reason}
        event = self._frame(ask, "text_completion") | {"choices": [choice]}
        return event | {"usage": self._usage(index + 1)} if last else event

    def _response(self, ask: Ask, count: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"generated_text": self._text(count)}
        if ask.details:
            listed = [self._token(index) for index in range(count)]
            ended = {"finish_reason": self._reason(count, openai=False), "generated_tokens": count}
            answer["details"] = ended | {"seed": ask.seed, "prefill": [], "tokens": listed}
        return answer

    def _completion(self, ask: Ask, count: int) -> dict[str, Any]:
        chat = ask.dialect is Dialect.CHAT
        said: dict[str, Any] = {"text": self._text(count)}
        if chat:
            said = {"message": {"role": "assistant", "content": self._text(count)}}
        ended = {"logprobs": None, "finish_reason": self._reason(count, openai=True)}
        choices = [{"index": index} | said | ended for index in range(ask.prompts)]
        frame = self._frame(ask, "chat.completion" if chat else "text_completion")
        return frame | {"choices": choices, "usage": self._usage(count, ask.prompts)}
