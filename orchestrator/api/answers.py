"""TGI's wire format: what the gateway and an embedded shard answer.

`to_json` leaves out what TGI leaves out and writes null where TGI writes null.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

FinishReason = Literal["length", "eos_token", "stop_sequence"]


def openai_reason(reason: FinishReason) -> str:
    """TGI's name on the chat route: `stop` for an end token, the other two unchanged."""
    return "stop" if reason == "eos_token" else reason


class Outgoing(BaseModel):
    """An answer or a part of one."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)
    left_out_when_empty: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _as_tgi(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        for name in self.left_out_when_empty:
            if not fields.get(name):
                fields.pop(name, None)
        return fields

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


class ErrorBody(Outgoing):
    error: str
    error_type: str


class EventError(Outgoing):
    message: str
    http_status_code: int
    """That it would have had before the stream began."""


class OpenAIErrorEvent(Outgoing):
    """An error inside a stream of the OpenAI routes."""

    error: EventError
    error_type: str | None = None


class PrefillToken(Outgoing):
    id: int
    text: str
    logprob: float | None


class Token(Outgoing):
    id: int
    text: str
    logprob: float
    special: bool


class BestOfSequence(Outgoing):
    left_out_when_empty = frozenset({"top_tokens"})
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[PrefillToken] = []
    tokens: list[Token] = []
    top_tokens: list[list[Token]] = []


class Details(Outgoing):
    """`details` of `/generate`."""

    left_out_when_empty = frozenset({"best_of_sequences", "top_tokens"})
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[PrefillToken] = []
    tokens: list[Token] = []
    best_of_sequences: list[BestOfSequence] | None = None
    top_tokens: list[list[Token]] = []


class GenerateResponse(Outgoing):
    left_out_when_empty = frozenset({"details"})
    generated_text: str
    details: Details | None = None


class StreamDetails(Outgoing):
    """`details` of the last event of `/generate_stream`."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    input_length: int


class StreamEvent(Outgoing):
    """One token of `/generate_stream`; `index` counts from 1, the last event fills the last two."""

    left_out_when_empty = frozenset({"top_tokens"})
    index: int
    token: Token
    top_tokens: list[Token] = []
    generated_text: str | None = None
    details: StreamDetails | None = None


class TopLogprob(Outgoing):
    token: str
    logprob: float


class ChatLogprob(Outgoing):
    token: str
    logprob: float
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Outgoing):
    content: list[ChatLogprob]

    @classmethod
    def of(cls, tokens: list[Token], top_tokens: list[list[Token]]) -> ChatLogprobs:
        """One entry a token; `top_tokens` may be shorter than `tokens`."""
        padded = top_tokens + [[]] * (len(tokens) - len(top_tokens))
        return cls(
            content=[
                ChatLogprob(
                    token=token.text,
                    logprob=token.logprob,
                    top_logprobs=[TopLogprob(token=other.text, logprob=other.logprob) for other in top],
                )
                for token, top in zip(tokens, padded, strict=True)
            ]
        )


class Usage(Outgoing):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


class ChatMessage(Outgoing):
    """A whole answer, or the piece of one that a chunk carries; every chunk names the role."""

    role: str = "assistant"
    content: str


class ChatChoice(Outgoing):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class OpenAiAnswer(Outgoing):
    """What every answer of the OpenAI routes begins with, whole or in pieces."""

    object: str
    id: str = ""
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(OpenAiAnswer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(Outgoing):
    index: int = 0
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(OpenAiAnswer):
    """One token of a chat; the usage chunk has no choices."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(Outgoing):
    """One prompt's answer on `/v1/completions`, or a piece of it with an empty `finish_reason`."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str


class CompletionChunk(OpenAiAnswer):
    """A piece of a prompt's answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Completion(CompletionChunk):
    """A whole answer, and the last event of each prompt of a stream."""

    usage: Usage


class SimpleToken(Outgoing):
    """One entry of `/tokenize`; start and stop are offsets into the input, in bytes."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Outgoing):
    tokenize_response: list[SimpleToken]
    templated_text: str


class Info(Outgoing):
    """`/info`."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    left_out_when_empty = frozenset({"notes"})
    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int = 1
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None
    notes: list[str] = []
    """Ours: which shards serve mixed only, and why; left out where there are none."""


class ModelInfo(Outgoing):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str


class ModelsInfo(Outgoing):
    object: Literal["list"] = "list"
    data: list[ModelInfo]
