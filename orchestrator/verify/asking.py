"""Send one case to a TGI server or to our gateway, and bring the answer to `Answer`'s form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import httpx

from orchestrator.core.sse import Event, Parser
from orchestrator.errors import OrchestratorError, Unreachable
from orchestrator.verify.answer import Answer, Route, Token
from orchestrator.verify.cases import Body, Case, Via

DEBUG_HEADERS = {"x-orchestrator-debug": "1"}
SPLIT_HEADERS = {**DEBUG_HEADERS, "x-orchestrator-choice": "separated"}
"""The separated path is what we want to see, whatever the cost model says."""
COMMENT_MARK = b": orchestrator "
Json = dict[str, Any]


class NotTgi(OrchestratorError):
    """The server answers, but not in TGI's shapes."""


async def ask(client: httpx.AsyncClient, case: Case, headers: Mapping[str, str] = DEBUG_HEADERS) -> Answer:
    """The answer to `case`.  `client` knows the base URL and the deadlines; Unreachable without one."""
    return await ask_body(client, case.via, case.body, headers)


async def ask_body(
    client: httpx.AsyncClient, via: Via, body: Body, headers: Mapping[str, str] = DEBUG_HEADERS
) -> Answer:
    try:
        async with client.stream("POST", via.path, json=dict(body), headers=headers) as response:
            told = _route_of(response.headers)
            if response.status_code != 200:
                return Answer(response.status_code, error=_error_of(await response.aread()), route=told)
            if via.streams:
                return await _streamed(response, via, told)
            return _whole(json.loads(await response.aread()), via, told, response.headers)
    except httpx.TransportError as error:
        raise Unreachable(f"{client.base_url} stopped answering: {_said(error)}.") from error
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise NotTgi(
            f"{client.base_url} answered {via.path} in a shape that TGI does not use: {error!r}."
        ) from error


async def get_json(client: httpx.AsyncClient, path: str) -> Any:
    """A JSON document; Unreachable when nobody answers or the status is not 200."""
    return await _json(client, "GET", path, None)


async def post_json(client: httpx.AsyncClient, path: str, body: Body) -> Any:
    return await _json(client, "POST", path, dict(body))


async def _json(client: httpx.AsyncClient, method: str, path: str, body: Json | None) -> Any:
    try:
        response = await client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise Unreachable(f"{client.base_url} does not answer: {_said(error)}.") from error
    if response.status_code != 200:
        raise Unreachable(f"{client.base_url} answers {path} with status {response.status_code}.")
    try:
        return response.json()
    except json.JSONDecodeError as error:
        raise NotTgi(f"{client.base_url} answers {path} with something that is not JSON.") from error


# --- whole answers ------------------------------------------------------------------------------


def _whole(raw: Json, via: Via, told: Route, headers: httpx.Headers) -> Answer:
    if via.chat:
        return _whole_chat(raw, told)
    details = raw["details"]
    prompt = headers.get("x-prompt-tokens")
    return Answer(
        status=200,
        text=raw["generated_text"],
        tokens=_tokens(details["tokens"], details.get("top_tokens")),
        finish_reason=details["finish_reason"],
        generated_tokens=details["generated_tokens"],
        prompt_tokens=int(prompt) if prompt else None,
        seed=details.get("seed"),
        route=told,
    )


def _whole_chat(raw: Json, told: Route) -> Answer:
    choice = raw["choices"][0]
    return Answer(
        status=200,
        text=choice["message"].get("content") or "",
        tokens=_chat_tokens(choice),
        finish_reason=choice["finish_reason"],
        generated_tokens=raw["usage"]["completion_tokens"],
        prompt_tokens=raw["usage"]["prompt_tokens"],
        calls=tuple(_call(call["function"]) for call in choice["message"].get("tool_calls") or ()),
        route=told,
    )


def _call(function: Json) -> tuple[str, str]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)


def _tokens(listed: Sequence[Json], top: Sequence[Sequence[Json]] | None) -> tuple[Token, ...]:
    """Tokens with their top lists; TGI leaves `top_tokens` out or empty where nobody asked."""
    return tuple(_token(raw, likely or ()) for raw, likely in zip_longest(listed, top or ()))


def _token(raw: Json, likely: Sequence[Json] = ()) -> Token:
    return Token(raw["id"], raw["text"], raw["logprob"], tuple(_token(item) for item in likely))


def _chat_tokens(choice: Json) -> tuple[Token, ...]:
    listed = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(_chat_token(item, item.get("top_logprobs") or ()) for item in listed)


def _chat_token(raw: Json, likely: Sequence[Json] = ()) -> Token:
    return Token(None, raw["token"], raw["logprob"], tuple(_chat_token(item) for item in likely))


# --- streams ------------------------------------------------------------------------------------


async def _streamed(response: httpx.Response, via: Via, told: Route) -> Answer:
    reader = _ChatReader() if via.chat else _GenerateReader()
    async for event in _events(response):
        told = _told_by(event, told)
        if event.data is None or event.data == b"[DONE]":
            continue
        payload = json.loads(event.data)
        if "error" in payload:
            return dataclasses.replace(reader.answer(), error=_error_text(payload), route=told)
        reader.read(payload)
    return dataclasses.replace(reader.answer(), route=told)


async def _events(response: httpx.Response) -> AsyncIterator[Event]:
    parser = Parser()
    async for piece in response.aiter_bytes():
        for event in parser.feed(piece):
            yield event
    for event in parser.finish():
        yield event


class _GenerateReader:
    """Collects `/generate_stream` events.  Only the event that ends it carries text and details."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.last: Json = {}

    def read(self, payload: Json) -> None:
        self.tokens.append(_token(payload["token"], payload.get("top_tokens") or ()))
        if payload.get("details"):
            self.last = payload

    def answer(self) -> Answer:
        if not self.last:
            return Answer(200, tokens=tuple(self.tokens), error="the stream ended without its last event")
        details = self.last["details"]
        return Answer(
            status=200,
            text=self.last["generated_text"],
            tokens=tuple(self.tokens),
            finish_reason=details["finish_reason"],
            generated_tokens=details["generated_tokens"],
            prompt_tokens=details.get("input_length"),
            seed=details.get("seed"),
        )


class _ChatReader:
    """Collects chat chunks; the usage chunk comes last and has no choice."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[Token] = []
        self.finish_reason = ""
        self.usage: Json | None = None
        self.calls: dict[int, tuple[str, str]] = {}
        """By index: the name comes with the first piece, the arguments in all of them."""

    def read(self, payload: Json) -> None:
        if payload.get("usage"):
            self.usage = payload["usage"]
        for choice in payload["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.tokens.extend(_chat_tokens(choice))
            self._add_calls(choice["delta"].get("tool_calls") or ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _add_calls(self, pieces: Sequence[Json] | Json) -> None:
        for piece in [pieces] if isinstance(pieces, Mapping) else pieces:
            name, arguments = self.calls.get(piece.get("index", 0), ("", ""))
            function = piece["function"]
            self.calls[piece.get("index", 0)] = (
                function.get("name") or name,
                arguments + (function.get("arguments") or ""),
            )

    def answer(self) -> Answer:
        if not self.finish_reason or self.usage is None:
            missing = "its usage chunk" if self.finish_reason else "a finish reason"
            return Answer(200, text=self.text, error=f"the stream ended without {missing}")
        return Answer(
            status=200,
            text=self.text,
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            generated_tokens=self.usage["completion_tokens"],
            prompt_tokens=self.usage["prompt_tokens"],
            calls=tuple(self.calls[index] for index in sorted(self.calls)),
        )


# --- how it was served --------------------------------------------------------------------------


def _route_of(headers: httpx.Headers) -> Route:
    return Route(
        choice=headers.get("x-orchestrator-route", ""),
        reason=headers.get("x-orchestrator-reason", ""),
        imported=headers.get("x-orchestrator-import", ""),
    )


def _told_by(event: Event, told: Route) -> Route:
    """`: orchestrator route=separated import=hit`: what a stream can only say at its end."""
    for line in event.raw.split(b"\n"):
        if line.startswith(COMMENT_MARK):
            pairs = dict(part.split("=", 1) for part in line.decode().split() if "=" in part)
            told = Route(
                choice=pairs.get("route", told.choice),
                reason=pairs.get("reason", told.reason),
                imported=pairs.get("import", told.imported),
            )
    return told


def _said(error: httpx.TransportError) -> str:
    """Its text; timeouts often have none."""
    return str(error) or type(error).__name__


def _error_of(body: bytes) -> str:
    try:
        return _error_text(json.loads(body))
    except json.JSONDecodeError:
        return body[:200].decode(errors="replace") or "an empty body"


def _error_text(payload: Any) -> str:
    if isinstance(payload, Mapping):
        error = payload.get("error", payload)
        return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
    return str(payload)
