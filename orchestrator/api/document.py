"""What `/api-doc/openapi.json` says of the routes: bodies, answers, errors and their models.

FastAPI knows the routes; it never reads a body, so each route tells here what it takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from orchestrator.api import answers, schemas, tool_answers

JSON = "application/json"
EVENTS = "text/event-stream"
_MODELS: tuple[type[BaseModel], ...] = (
    schemas.GenerateBody,
    schemas.ChatRequest,
    schemas.CompletionRequest,
    answers.GenerateResponse,
    answers.StreamEvent,
    answers.ChatCompletion,
    answers.ChatChunk,
    tool_answers.ToolCompletion,
    tool_answers.ToolChunk,
    answers.Completion,
    answers.CompletionChunk,
    answers.SimpleToken,
    answers.ChatTokenizeResponse,
    answers.Info,
    answers.ModelsInfo,
    answers.ErrorBody,
    answers.OpenAIErrorEvent,
)
"""With all that they consist of."""
_DESCRIPTION = """\
Text generation by separate prefill and decode shards behind the HTTP API of Text Generation
Inference v3.3.7.  `docs/api.md` names what differs from TGI."""
_TAGS = [
    {"name": "Text Generation Inference", "description": "TGI's own routes."},
    {"name": "OpenAI", "description": "The OpenAI routes that TGI has."},
    {"name": "Administration", "description": "For the operator of a gateway."},
]
_ERRORS = {
    401: "No API key or token, or one that is not known",
    404: "Served at another address only",
    408: "The body did not come in time",
    413: "The body is larger than the gateway reads",
    422: "Not a request of this route, or one that TGI's validation refuses",
    424: "A shard refused or failed",
    429: "Too many requests; `Retry-After` says when to come again",
    502: "The shard that served the request went away",
    503: "No shard can serve now; `Retry-After` says when to come again",
    504: "The request took longer than it may",
}
_TEXT = {"type": "string"}
_HEADERS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "x-request-id": (_TEXT, "Names the request in logs and in the answer; otherwise one is made."),
    "x-orchestrator-debug": (_TEXT, "`1`: the answer tells its phases."),
    "x-orchestrator-priority": ({"enum": ["high", "normal", "low"]}, "Who is served first, while many wait."),
    "x-orchestrator-choice": (
        {"enum": ["separated", "mixed"]},
        "Split over two shards where it can be, or served by one; otherwise whichever costs less.",
    ),
    "x-orchestrator-timeout-s": (
        {"type": "string", "pattern": r"^[1-9][0-9]{0,5}(\.[0-9]{1,6})?$"},
        "Seconds, from arrival to the last token; the gateway's own limit holds as well.",
    ),
}


class Json(Response):
    """Bytes that are JSON already."""

    media_type = JSON


class Events(Response):
    media_type = EVENTS


def generation(body: type[BaseModel], answered: Mapping[str, Any]) -> dict[str, Any]:
    """How a route that generates is described; `answered` by media type."""
    described = asked(body, answered, (401, 408, 413, 422, 424, 429, 502, 503, 504))
    described["response_class"] = JSONResponse if JSON in answered else Events
    parameters = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, (schema, text) in _HEADERS.items()
    ]
    extra = {"parameters": parameters, "security": [{"bearer": []}, {}]}
    return described | {"openapi_extra": described["openapi_extra"] | extra}


def asked(body: type[BaseModel], answered: Mapping[str, Any], errors: Iterable[int]) -> dict[str, Any]:
    """How a route that takes a body is described."""
    content = {JSON: {"schema": of(body)}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "response_class": JSONResponse,
        "responses": {200: _answer("The answer", answered)} | refusals(*errors),
    }


def told(schema: Any, *errors: int) -> dict[str, Any]:
    """How a route that only tells something is described."""
    return {
        "response_class": JSONResponse,
        "responses": {200: _answer("What was asked for", {JSON: schema})} | refusals(*errors),
    }


def refusals(*statuses: int) -> dict[int | str, Any]:
    """The errors of a route, in TGI's shape."""
    return {status: _answer(_ERRORS[status], {JSON: of(answers.ErrorBody)}) for status in statuses}


def of(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def any_of(*models: type[BaseModel]) -> dict[str, Any]:
    return {"anyOf": [of(model) for model in models]}


def array(model: type[BaseModel]) -> dict[str, Any]:
    return {"type": "array", "items": of(model)}


def events(*models: type[BaseModel], done: bool = False) -> dict[str, Any]:
    """Each event of a stream: its `data` is one of these, or with `done` the last one's `[DONE]`."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": any_of(*models)}
    if done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _answer(description: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "description": description,
        "content": {kind: {"schema": schema} for kind, schema in content.items()},
    }


def add_heads(router: APIRouter) -> None:
    """HEAD wherever there is GET, as TGI's server answers it; the document leaves it out."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            endpoint: Callable[..., Any] = route.endpoint
            router.add_api_route(route.path, endpoint, methods=["HEAD"], include_in_schema=False)


def describe(app: FastAPI) -> None:
    """Title, tags and the models that the routes refer to."""
    app.title, app.version, app.description = "tgi-orchestrator", version("tgi-orchestrator"), _DESCRIPTION
    app.openapi_tags = _TAGS
    drawn = app.openapi
    app.openapi = lambda: _with_models(drawn())  # type: ignore[method-assign]


def _with_models(document: dict[str, Any]) -> dict[str, Any]:
    _, models = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    scheme = {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, where the gateway asks for one.",
    }
    parts = document.get("components", {})
    known = parts.get("schemas", {}) | models["$defs"]
    components = parts | {"schemas": known, "securitySchemes": {"bearer": scheme}}
    return document | {"components": components}
