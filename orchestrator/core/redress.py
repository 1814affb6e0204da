"""One client request as two legs, and two answers as one: bodies out, events back.  Pure.

Put leg: the request with one new token, its tag in `adapter_id` or `model`; its only token goes to
the client as if more would follow.  Get leg: the true request; its first token was sent already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from orchestrator.core.sse import Event
from orchestrator.core.validation import GenerateParameters
from tgi_patches.contract import TAG_MARK, GetTag, PutTag, carries_tag

Json = Mapping[str, Any]


class Dialect(StrEnum):
    """Whose request and event shapes a route speaks."""

    TGI = "tgi"
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class FirstToken:
    """What the put leg's event says, and how the client gets to see it."""

    event: dict[str, Any]
    """Re-dressed: nothing in it says that the request ended, unless it did."""
    token_id: int | None
    """None on the OpenAI routes, whose events carry no id."""
    text: str
    ended: bool
    """The request was complete with this token."""


def may_split(parameters: GenerateParameters, *, choices: int = 1, tools: bool, images: bool) -> bool:
    """False for what is always served whole, by one shard."""
    return (
        (parameters.best_of or 1) <= 1
        and not parameters.decoder_input_details
        and choices <= 1
        and not tools
        and not images
    )


def client_tag(dialect: Dialect, raw: Json) -> str | None:
    """The client's own adapter name if it carries the mark that only the gateway may send."""
    name = adapter(dialect, raw)
    return name if carries_tag(name) else None


def put_tag(dialect: Dialect, raw: Json, handle: str, *, pinned: bool = False) -> PutTag:
    """The put leg's tag: export under `handle`, `pinned` only to a shard that has room for such records."""
    return PutTag(handle, adapter(dialect, raw), pinned)


def put_body(dialect: Dialect, raw: Json, tag: PutTag, seed: int | None) -> dict[str, Any]:
    """The prefill shard's body.  `seed` None leaves the client's own (or none) in place."""
    if dialect is Dialect.TGI:
        # Details, so that the answer says why it ended; a client that wants none never sees them.
        return _with_parameters(raw, adapter_id=str(tag), max_new_tokens=1, details=True, **_seed(seed))
    body = {key: value for key, value in raw.items() if key != "max_completion_tokens"}
    return body | {"model": str(tag), "max_tokens": 1} | _seed(seed)


def get_body(dialect: Dialect, raw: Json, tag: GetTag, seed: int | None, cap: int | None) -> dict[str, Any]:
    """The decode shard's body: the true request.  `cap` replaces its length when the mode says so."""
    if dialect is Dialect.TGI:
        limit = {} if cap is None else {"max_new_tokens": cap}
        return _with_parameters(raw, adapter_id=str(tag), **limit, **_seed(seed))
    return whole_body(dialect, raw, cap) | {"model": str(tag)} | _seed(seed)


def whole_body(dialect: Dialect, raw: Json, cap: int | None) -> dict[str, Any]:
    """The body for one shard that serves the request alone."""
    if cap is None:
        return dict(raw)
    if dialect is Dialect.TGI:
        return _with_parameters(raw, max_new_tokens=cap)
    return {key: value for key, value in raw.items() if key != "max_completion_tokens"} | {"max_tokens": cap}


def get_tag(dialect: Dialect, raw: Json, *, handle: str, shard: str, epoch: int, first: int | None) -> GetTag:
    """The get leg's tag: where the record is, and which first token was sent."""
    return GetTag(handle, shard, epoch, first, adapter(dialect, raw))


def adapter(dialect: Dialect, raw: Json) -> str:
    """The adapter that the client asks for; empty for the model itself."""
    if dialect is Dialect.TGI:
        return str((raw.get("parameters") or {}).get("adapter_id") or "")
    model = raw.get("model")
    return "" if model in (None, "tgi") else str(model)


def _with_parameters(raw: Json, **changes: Any) -> dict[str, Any]:
    # Absent parameters sample, a present object is greedy by default: say which before adding one.
    parameters = raw.get("parameters", {"do_sample": True})
    return {**raw, "parameters": {**parameters, **changes}}


def _seed(seed: int | None) -> dict[str, int]:
    return {} if seed is None else {"seed": seed}


# --- events and answers back --------------------------------------------------------------------


_GOING_ON = {
    Dialect.TGI: b'"generated_text":null',
    Dialect.CHAT: b'"finish_reason":null',
    Dialect.COMPLETION: b'"finish_reason":""',
}


def going_on(dialect: Dialect) -> bytes:
    """Bytes that stand in every token event after which more follow, and in no event that ends an answer.

    Inside a JSON string a quote is escaped, so they cannot stand in a token's text.  An event may
    lack them and yet end nothing (a chat's usage, another way of writing JSON): then `ends` reads it.
    """
    return _GOING_ON[dialect]


def ends(dialect: Dialect, data: bytes) -> int:
    """How many answers this event ends.  Raises ValueError for what is not JSON."""
    if data.find(_GOING_ON[dialect]) >= 0 or data == b"[DONE]":
        return 0
    event = orjson.loads(data)
    if not isinstance(event, dict):
        raise ValueError("an event's data is an object")
    if dialect is Dialect.TGI:
        return int(event.get("generated_text") is not None)
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("an event's choices are objects")
    return sum(bool(choice.get("finish_reason")) for choice in choices)


def is_token(dialect: Dialect, event: Json) -> bool:
    """True for an event that stands for one token, also one whose text is still empty.

    A chat may start with a chunk that only names the role, and end with one that only counts.
    """
    if dialect is Dialect.TGI:
        return {"id", "text"} <= (event.get("token") or {}).keys()
    choices = event.get("choices") or ()
    if dialect is Dialect.COMPLETION:
        return any("text" in choice for choice in choices)
    deltas = [choice.get("delta") or {} for choice in choices]
    return any("content" in delta or "tool_calls" in delta for delta in deltas)


def finish_reason(dialect: Dialect, event: Json) -> str | None:
    """Why the answer ended here (event or whole answer); None where it goes on or does not say."""
    if dialect is Dialect.TGI:
        reason = (event.get("details") or {}).get("finish_reason")
    else:
        reason = next((choice.get("finish_reason") for choice in event.get("choices") or ()), None)
    return str(reason) if reason else None


def error_event(dialect: Dialect, text: str, status: int, error_type: str) -> dict[str, Any]:
    """The payload of an error inside a stream, as the route's clients read it.

    The OpenAI routes of TGI put 422 whatever happened; here it is the status that it would have had.
    """
    if dialect is Dialect.TGI:
        return {"error": text, "error_type": error_type}
    return {"error": {"message": text, "http_status_code": status}, "error_type": error_type}


def ended_at_first(reason: str | None, max_new_tokens: int) -> bool:
    """Whether the put leg's only token completed the request.

    The put leg may generate one token, so `length` says nothing about a request that may have more.
    """
    return max_new_tokens <= 1 or reason not in (None, "length")


def first_token(
    dialect: Dialect, event: Json, *, max_new_tokens: int, wants_details: bool, model: str
) -> FirstToken:
    """The put leg's token event, as the client is to see it."""
    ended = ended_at_first(finish_reason(dialect, event), max_new_tokens)
    if dialect is Dialect.TGI:
        token = event["token"]
        keep = {} if ended else {"generated_text": None}
        details = event.get("details") if ended and wants_details else None
        return FirstToken({**event, **keep, "details": details}, token["id"], token["text"], ended)
    kept = event if ended else _open(dialect, event)
    return FirstToken({**kept, "model": _told_model(event, model)}, None, text_of(dialect, event), ended)


def _open(dialect: Dialect, event: Json) -> dict[str, Any]:
    """An OpenAI event that does not end anything; a completion's last one counts, its others do not."""
    going = None if dialect is Dialect.CHAT else ""
    choices = [{**choice, "finish_reason": going} for choice in event["choices"]]
    counts = {"usage"} if dialect is Dialect.COMPLETION else set()
    return {key: value for key, value in event.items() if key not in counts} | {"choices": choices}


def _told_model(event: Json, model: str) -> str:
    """The client's own name where the shard echoed our tag, else what the shard says.

    A chat echoes `model`; TGI's completions name the served model whatever was asked for.
    """
    told = str(event.get("model") or "")
    return model if carries_tag(told) or not told else told


def generated_tokens(dialect: Dialect, answer: Json) -> int | None:
    """How many tokens a whole answer says it has; None where it does not say."""
    if dialect is Dialect.TGI:
        return (answer.get("details") or {}).get("generated_tokens")
    return (answer.get("usage") or {}).get("completion_tokens")


def text_of(dialect: Dialect, event: Json) -> str:
    """The text that a token event adds."""
    if dialect is Dialect.TGI:
        return str(event["token"]["text"])
    choice = event["choices"][0]
    if dialect is Dialect.COMPLETION:
        return str(choice.get("text") or "")
    return str(choice["delta"].get("content") or "")


def same_token(dialect: Dialect, event: Json, first: FirstToken) -> bool:
    """Whether the get leg redid the token that the client has already seen."""
    if first.token_id is not None and dialect is Dialect.TGI:
        return bool(event["token"]["id"] == first.token_id)
    return text_of(dialect, event) == first.text


def only_the_end(dialect: Dialect, event: Json, model: str) -> dict[str, Any]:
    """A final event whose token was sent before: the same ending, without its text."""
    if dialect is Dialect.TGI:
        return {**event, "token": {**event["token"], "text": ""}}
    choices = [{**choice, **_without_text(dialect, choice)} for choice in event["choices"]]
    return {**event, "choices": choices, "model": _told_model(event, model)}


def _without_text(dialect: Dialect, choice: Json) -> dict[str, Any]:
    if dialect is Dialect.COMPLETION:
        return {"text": ""}
    return {"delta": {**choice["delta"], "content": ""}}


def ended_answer(dialect: Dialect, answer: Json, *, wants_details: bool, model: str) -> dict[str, Any]:
    """The put leg's whole answer, for a client whose request ended at its first token."""
    if dialect is not Dialect.TGI:
        return {**answer, "model": _told_model(answer, model)}
    return dict(answer) if wants_details else {k: v for k, v in answer.items() if k != "details"}


def put_back_model(data: bytes, tag: str, model: str) -> bytes:
    """The OpenAI routes may echo `model`: replace our tag by the client's own name, without parsing.

    The quotes are part of what is searched, so only a whole JSON string can match.
    """
    restored = data.replace(orjson.dumps(tag), orjson.dumps(model))
    if TAG_MARK.encode() not in restored:
        return restored
    # Another spelling of the same string (escapes), or a user who writes about tags.
    payload = orjson.loads(restored)
    return restored if payload.get("model") != tag else orjson.dumps({**payload, "model": model})


def relayed(dialect: Dialect, event: Event, tag: str, model: str) -> bytes:
    """A later event of a leg, as the client gets it: TGI's untouched, others with their `model`."""
    if dialect is Dialect.TGI or not tag:
        return event.raw
    # Line ends stand only between JSON's tokens; one line is one `data` field.
    data = (event.data or b"").replace(b"\n", b" ")
    return b"data: " + put_back_model(data, tag, model) + b"\n\n"


def relayed_answer(dialect: Dialect, body: bytes, tag: str, model: str) -> bytes:
    """The get leg's whole answer, as the client gets it."""
    return body if dialect is Dialect.TGI else put_back_model(body, tag, model)
