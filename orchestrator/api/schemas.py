"""TGI's wire format: what clients send to the gateway and to an embedded shard.

Unknown fields are ignored, wrong types refused, as serde does (router/src/lib.rs of v3.3.7): no
number from a string, no null where TGI has no option.  The answers stand in `answers.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict

from orchestrator.core.validation import GenerateParameters as CoreParameters
from orchestrator.core.validation import GenerateRequest, chat_parameters
from orchestrator.errors import InvalidRequest

U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
F32 = Annotated[float, Field(allow_inf_nan=False)]


def _told(**bounds: float) -> Any:
    """Bounds that the document tells; `core.validation` checks them, with TGI's own sentences."""
    return Field(json_schema_extra=dict(bounds))


Positive = Annotated[F32, _told(exclusiveMinimum=0)]
NotNegative = Annotated[F32, _told(minimum=0)]
Penalty = Annotated[F32, _told(minimum=-2, maximum=2)]
Share = Annotated[F32, _told(exclusiveMinimum=0, exclusiveMaximum=1)]
AtLeastOne = Annotated[U32, _told(minimum=1)]
Body = TypeVar("Body", bound="Incoming")
_WRITABLE_DEPTH = 254
"""Levels that orjson writes."""


class Incoming(BaseModel):
    """A request body or a part of one."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


_JSON: JsonDict = {"properties": {"type": {"enum": ["json", "json_object"]}}}
_REGEX: JsonDict = {"properties": {"type": {"const": "regex"}, "value": {"type": "string"}}}
_JSON_SCHEMA: JsonDict = {
    "properties": {"type": {"const": "json_schema"}, "value": {"type": "object", "required": ["schema"]}}
}


class Grammar(Incoming):
    """`{"type": "json" | "json_object" | "json_schema" | "regex", "value": ...}`"""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_JSON, _REGEX, _JSON_SCHEMA]})
    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any
    """A JSON Schema; of `json_schema` an object with `schema` in it; of `regex` a string."""

    @model_validator(mode="after")
    def _value_is_of_its_type(self) -> Self:
        if self.type == "regex" and not isinstance(self.value, str):
            raise ValueError("the value of a `regex` is a string")
        if self.type == "json_schema" and not (isinstance(self.value, dict) and "schema" in self.value):
            raise ValueError("the value of a `json_schema` is an object with a `schema`")
        return self


class GenerateParameters(Incoming):
    """`parameters` of TGI's own routes."""

    best_of: Annotated[U64, _told(minimum=1)] | None = None
    """Generate that many answers and give the likeliest; needs sampling, and no stream."""
    temperature: Positive | None = None
    repetition_penalty: Positive | None = None
    """1 is none."""
    frequency_penalty: Penalty | None = None
    top_k: Annotated[I32, _told(minimum=1)] | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    do_sample: bool = False
    """Whether to draw tokens; true where `parameters` is absent."""
    max_new_tokens: AtLeastOne | None = None
    """Absent: as many as fit."""
    return_full_text: bool | None = None
    """Puts the prompt in front; the default of `POST /` is true, of the others false."""
    stop: list[str] = []
    """The answer ends with the first of these."""
    truncate: Annotated[U64, _told(minimum=1)] | None = None
    """Keep only so many of the prompt's last tokens."""
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    """Log probabilities of the prompt's tokens; not in a stream."""
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    """Tell so many of the likeliest tokens of each step."""
    grammar: Grammar | None = None
    adapter_id: str | None = None
    """A LoRA adapter."""
    ignore_eos_token: bool = False
    """Ours: an embedded shard then generates `max_new_tokens` whatever comes.  TGI ignores the field."""

    def to_core(self, **changes: Any) -> CoreParameters:
        """The same, as the pure policies take it."""
        return CoreParameters(**{**self.__dict__, "stop": tuple(self.stop), **changes})


_ABSENT = GenerateParameters(do_sample=True)
"""What TGI uses when a body has no `parameters` (lib.rs, default_parameters)."""


class GenerateBody(Incoming):
    """Body of `/`, `/generate`, `/generate_stream` and `/tokenize`; `stream` counts only on `/`."""

    inputs: str
    parameters: GenerateParameters = _ABSENT
    """Absent ones sample, an empty object is greedy."""
    stream: bool = False

    def to_request(self) -> GenerateRequest:
        return GenerateRequest(self.inputs, self.parameters.to_core())


class ImageUrl(Incoming):
    url: str


class TextChunk(Incoming):
    type: Literal["text"]
    text: str

    def as_text(self) -> str:
        return self.text


class ImageChunk(Incoming):
    type: Literal["image_url"]
    image_url: ImageUrl

    def as_text(self) -> str:
        return f"![]({self.image_url.url})"


MessageChunk = Annotated[TextChunk | ImageChunk, Field(discriminator="type")]
"""A part of a message: text, or the address of an image."""


_SAYS: JsonDict = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLS: JsonDict = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array"}}}


class Message(Incoming):
    """One turn of a chat."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_SAYS, _CALLS]})
    role: str
    content: str | list[MessageChunk] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None

    def as_text(self) -> str:
        """What the chat template sees as `content` (lib.rs, From<Message> for TextMessage)."""
        if isinstance(self.content, str):
            return self.content
        if self.content is not None:
            return "".join(chunk.as_text() for chunk in self.content)
        return orjson.dumps(self.tool_calls or []).decode()

    @property
    def has_image(self) -> bool:
        chunks = self.content if isinstance(self.content, list) else []
        return any(chunk.type == "image_url" for chunk in chunks)


class ToolFunction(Incoming):
    name: str
    description: str | None = None
    arguments: Any = Field(default=None, validation_alias=AliasChoices("arguments", "parameters"))
    """A JSON Schema; also spelled `parameters`."""


class Tool(Incoming):
    type: str
    function: ToolFunction


_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_TYPED_CHOICE = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _NAMED},
}
_CHOICE_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _TYPED_CHOICE, {"type": "null"}]})


class StreamOptions(Incoming):
    include_usage: bool = False


class ChatRequest(Incoming):
    """Body of `/v1/chat/completions` and `/chat_tokenize`.

    `logit_bias`, `n` and most of what else OpenAI knows are ignored by TGI, and so by us.
    """

    model: str | None = None
    messages: list[Message]
    frequency_penalty: Penalty | None = None
    logit_bias: list[F32] | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    max_tokens: AtLeastOne | None = Field(
        default=None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    """Also spelled `max_completion_tokens`; absent: as many as fit."""
    n: U32 | None = None
    presence_penalty: Annotated[F32, _told(exclusiveMinimum=-2)] | None = None
    stop: list[str] | None = None
    stream: bool = False
    seed: U64 | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    tools: list[Tool] | None = None
    tool_prompt: str | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, _CHOICE_SCHEMA] = None
    """`auto`, `none`, `required`, a function's name, or the object that names one."""
    response_format: Grammar | None = None
    stream_options: StreamOptions = StreamOptions()

    @field_validator("messages", mode="after")
    @classmethod
    def _each_says_something(cls, messages: list[Message]) -> list[Message]:
        if any(message.content is None and message.tool_calls is None for message in messages):
            raise ValueError("a message needs `content` or `tool_calls`")
        return messages

    @field_validator("tool_choice", mode="after")
    @classmethod
    def _names_a_function(cls, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                raise ValueError('expected {"type": "function", "function": {"name": ...}}')
        return choice

    @property
    def has_image(self) -> bool:
        return any(message.has_image for message in self.messages)

    def to_parameters(self) -> CoreParameters:
        """The parameters that TGI makes of a chat."""
        return chat_parameters(
            model=self.model,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop or (),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            top_logprobs=self.top_logprobs,
            grammar=self.response_format,
        )


class CompletionRequest(Incoming):
    """Body of `/v1/completions`; `prompt` may be several."""

    model: str | None = None
    prompt: str | Annotated[list[str], Field(json_schema_extra={"minItems": 1})]
    max_tokens: AtLeastOne | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    stream: bool = False
    seed: U64 | None = None
    suffix: str | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    stop: list[str] | None = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _at_least_one(cls, prompt: str | list[str]) -> str | list[str]:
        if prompt == []:
            raise ValueError("Empty array detected. Do not use an empty array for the prompt.")
        return prompt

    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)

    def to_parameters(self) -> CoreParameters:
        """As TGI maps them: only `temperature` 0 is greedy; a `model` other than "tgi" is the adapter."""
        greedy = self.temperature == 0.0
        return CoreParameters(
            temperature=None if greedy else self.temperature,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            top_p=self.top_p,
            do_sample=not greedy,
            max_new_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            details=True,
            seed=self.seed,
            adapter_id=None if self.model == "tgi" else self.model,
        )


def parse_body(model: type[Body], body: bytes) -> tuple[Body, dict[str, Any]]:
    """A body as its model and as plain JSON.  Raises InvalidRequest for bad UTF-8, JSON or types."""
    raw = parse_json(body)
    try:
        return model.__pydantic_validator__.validate_python(raw), raw
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise wrong_type(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object that can be written again, or InvalidRequest."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"Failed to parse the request body as JSON: {error}") from None
    # orjson reads deeper nesting than it writes, and a leg is written anew.  Nothing is nested deeper
    # than it has opening brackets, so that the trial is for bodies with very many of them.
    if body.count(b"[") + body.count(b"{") > _WRITABLE_DEPTH:
        _refuse_unwritable(raw)
    if not isinstance(raw, dict):
        raise wrong_type("expected an object")
    return raw


def wrong_type(reason: str) -> InvalidRequest:
    """JSON, but not what the route reads: TGI's wording."""
    return InvalidRequest(f"Failed to deserialize the JSON body into the target type: {reason}")


def _refuse_unwritable(raw: Any) -> None:
    try:
        orjson.dumps(raw)
    except orjson.JSONEncodeError:
        raise InvalidRequest("Failed to parse the request body as JSON: it is nested too deeply") from None
