"""What a shard's log says of each generation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.api.schemas import GenerateBody
from orchestrator.embedded.shard.access import Origin, logged
from orchestrator.embedded.shard.assemble import assemble
from orchestrator.embedded.shard.seam import Generation, Request, Sampling, Stopping
from orchestrator.errors import Overloaded
from tests.integration.test_shard_server import CHAT, PROMPT, serving, spec
from tgi_patches.contract import GetTag, PutTag, Role, new_handle


async def test_every_generation_has_one_line_with_its_requests_id_and_nothing_said(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(assemble(spec(tiny_model, tmp_path, Role.MIXED))) as client:
        with capture_logs() as lines:
            handle, headers = new_handle(), {"x-request-id": "req-1"}
            for tag in ("", str(PutTag(handle)), str(GetTag(new_handle(), "elsewhere-0", 1, 9))):
                parameters = {"max_new_tokens": 2, "adapter_id": tag}
                await client.post(
                    "/generate", json={"inputs": PROMPT, "parameters": parameters}, headers=headers
                )
            prompts = {"prompt": ["one", "two"], "max_tokens": 1, "stream": True}
            await client.post("/v1/completions", json=prompts, headers={"x-request-id": "a\tb"})
            talk = {"messages": CHAT, "tools": [], "max_tokens": 50}
            await client.post("/v1/chat/completions", json=talk)
            await client.post("/generate", json={"inputs": ""}, headers=headers)
    found = [line for line in lines if line["event"] == "generation"]
    prompt_tokens = found[0]["prompt_tokens"]
    assert prompt_tokens > 5
    assert all(line.pop("took_s") > 0 for line in found)
    assert found[:3] == [
        {
            "event": "generation",
            "log_level": "info",
            "request_id": "req-1",
            "route": "/generate",
            "leg": leg,
            "prompt_tokens": prompt_tokens,
            "generated_tokens": 2,
            "import_result": result,
            "outcome": "length",
        }
        for leg, result in (("plain", ""), ("put", ""), ("get", "missing"))
    ]
    assert [(line["route"], line["request_id"]) for line in found[3:]] == [
        *[("/v1/completions", "")] * 2,
        *[("/v1/chat/completions", "")] * 2,
    ]


async def test_a_generation_that_its_client_leaves_is_told_of(tiny_model: Path, tmp_path: Path) -> None:
    made = assemble(spec(tiny_model, tmp_path, Role.MIXED))
    async with serving(made):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 500, "ignore_eos_token": True}}
        asked = GenerateBody.model_validate(body).to_request()
        prepared = await made.server.service.prepare(asked, stream=True, origin=Origin("req-2", "/x"))
        with capture_logs() as lines:
            steps = made.server.service.stream(prepared)
            await anext(steps)
            await steps.aclose()
    (line,) = [line for line in lines if line["event"] == "generation"]
    assert (line["outcome"], line["request_id"], line["generated_tokens"]) == ("left", "req-2", 1)


async def test_a_generation_that_fails_is_told_by_its_error_type() -> None:
    async def refused() -> AsyncGenerator[Generation]:
        none: tuple[Generation, ...] = ()
        for generation in none:
            yield generation
        raise Overloaded("Model is overloaded")

    request = Request(0, "secret", (1, 2, 3), Sampling(), Stopping(1), ())
    with capture_logs() as lines, pytest.raises(Overloaded):
        await anext(logged(refused(), Origin("req-3", "/generate"), request))
    (line,) = lines
    assert (line["outcome"], line["prompt_tokens"], line["generated_tokens"]) == ("overloaded", 3, 0)
    assert "secret" not in str(line)
