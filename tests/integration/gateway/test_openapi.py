"""The OpenAPI document is true: schemathesis asks what it allows, and what it forbids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

EXAMPLES = 12
"""Per operation and kind of data."""
SEMANTIC = (
    "Input validation error: ",
    "Tool error: ",
    "Suffix is not supported",
    "Number of prompts exceeds",
)
"""How a refusal begins that no schema can tell: it depends on several fields, or on the model."""
COUNTING = ("/tokenize", "/chat_tokenize")
"""As in TGI, they look at types, and not at values that only a generation needs."""
ANSWERED = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)
TGI_ROUTES = {
    ("/", "get"),
    ("/", "post"),
    ("/generate", "post"),
    ("/generate_stream", "post"),
    ("/v1/chat/completions", "post"),
    ("/v1/completions", "post"),
    ("/v1/models", "get"),
    ("/tokenize", "post"),
    ("/chat_tokenize", "post"),
    ("/info", "get"),
    ("/health", "get"),
    ("/ping", "get"),
    ("/metrics", "get"),
}

KEYED = {(path, method) for path, method in TGI_ROUTES if method == "post"}
KEYED |= {("/metrics", "get")}


async def document_of(house: Any) -> dict[str, Any]:
    response = await house.http.get("/api-doc/openapi.json")
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, described in document["paths"].items():
        for method, operation in described.items():
            yield path, method, operation


def refs(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (value for key, value in part.items() if key == "$ref")
        for value in part.values():
            yield from refs(value)
    elif isinstance(part, list):
        for value in part:
            yield from refs(value)


async def test_every_route_of_tgi_is_described_with_bodies_answers_and_errors(house: Any) -> None:
    document = await document_of(house)
    found = {(path, method) for path, method, _ in operations(document)}
    assert found >= TGI_ROUTES
    for path, method, operation in operations(document):
        if (path, method) not in TGI_ROUTES:
            continue
        assert operation["summary"], path
        assert ("requestBody" in operation) is (method == "post")
        assert ("401" in operation["responses"]) is ((path, method) in KEYED)
        for status, answer in operation["responses"].items():
            if status != "200":
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert document["info"]["title"] == "tgi-orchestrator"
    assert document["info"]["description"]


async def test_every_reference_leads_somewhere(house: Any) -> None:
    document = await document_of(house)
    models = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in refs(document)} <= set(models)


async def test_docs_page_shows_the_document(house: Any) -> None:
    page = await house.http.get("/docs")
    assert page.status_code == 200
    assert "/api-doc/openapi.json" in page.text


async def test_heads_are_answered_where_gets_are(house: Any) -> None:
    for path in ("/", "/health", "/ping", "/info", "/v1/models", "/metrics"):
        head = await house.http.head(path)
        assert (head.status_code, head.content) == (200, b"")


def as_serde_reads(part: Any) -> Any:
    """To JSON Schema 5.0 is an integer, to TGI and to us it is none: whole numbers without a point."""
    if isinstance(part, dict):
        return {key: as_serde_reads(value) for key, value in part.items()}
    if isinstance(part, list):
        return [as_serde_reads(value) for value in part]
    return int(part) if isinstance(part, float) and part.is_integer() and abs(part) < 2**53 else part


def conversation(url: str, document: dict[str, Any], mode: GenerationMode) -> dict[int, int]:
    """Asks everything; how often which status came.  Runs in a thread: the gateway is in the loop."""
    statuses: dict[int, int] = {}

    def ask(operation: Any) -> None:
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def asked(case: Any) -> None:
            if mode is GenerationMode.POSITIVE:
                case.body = as_serde_reads(case.body)
            response = case.call(base_url=url)
            if mode is GenerationMode.POSITIVE or operation.path not in COUNTING:
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500
            case.validate_response(response, checks=list(ANSWERED))
            if mode is GenerationMode.NEGATIVE and operation.path not in COUNTING:
                assert response.status_code >= 400, case.as_curl_command()
            elif mode is GenerationMode.POSITIVE and response.status_code >= 400:
                assert response.json()["error"].startswith(SEMANTIC), response.text

        asked()

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.POSITIVE or operation.body:
            ask(operation)
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_gateway_does_what_the_document_says(house: Any, mode: GenerationMode) -> None:
    document = await document_of(house)
    statuses = await asyncio.to_thread(conversation, house.url, document, mode)
    assert (200 in statuses) is (mode is GenerationMode.POSITIVE)
    await house.quiet()
    assert house.reserved == (0, 0, 0)
