"""What a gateway tells of its mode, of Redis and of its shards, and how a client chooses its way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orchestrator.core.cost import Costs, DecodeCost
from orchestrator.core.degraded import mode_of
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import Choice

BODY = {"inputs": "Hello", "parameters": {"max_new_tokens": 20}}
HEALTH = ("/health", "/ping", "/")
DETAIL = {
    "status": "ok",
    "mode": {"level": 0, "name": "normal", "output_cap": None, "shed_below": None},
    "redis": True,
    "impaired": False,
    "shards": {"ready": 2, "known": 2},
}
LOST = "Redis does not answer: 10.0.0.9:6379: Connection refused."


@pytest.mark.parametrize("path", HEALTH)
async def test_health_is_empty_for_tgis_clients_in_any_mode(house: Any, path: str) -> None:
    house.queue.mode = mode_of(3, reason="50 % of the decode capacity is ready.")
    house.queue.degraded = LOST
    response = await house.http.get(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["x-orchestrator-mode"] == "3"
    assert response.headers["x-orchestrator-degraded"] == "1"


async def test_nothing_unusual_is_told_while_all_is_well(house: Any) -> None:
    headers = (await house.http.get("/health")).headers
    assert [name for name in headers if name.startswith("x-orchestrator")] == []


@pytest.mark.parametrize("path", HEALTH)
async def test_the_detail_is_told_to_who_asks_for_it(house: Any, path: str) -> None:
    response = await house.http.get(path, params={"detail": ""})
    assert (response.status_code, response.json()) == (200, DETAIL)
    assert response.headers["content-type"] == "application/json"


async def test_the_detail_tells_modes_and_what_is_missing_and_no_address(house: Any) -> None:
    house.queue.mode = mode_of(4, auto=False, reason="Host B is down.")
    house.queue.degraded = LOST
    house.queue.connected = False
    house.queue.set_state("decode-1", ShardState.DEAD)
    response = await house.http.get("/health?detail=1")
    assert (response.status_code, response.json()) == (
        200,
        {
            "status": "degraded",
            "mode": {"level": 4, "name": "shedding", "output_cap": 128, "shed_below": 0},
            "redis": False,
            "impaired": True,
            "shards": {"ready": 1, "known": 2},
        },
    )
    assert "10.0.0.9" not in response.text
    assert "Host B" not in response.text


async def test_an_unhealthy_gateway_says_so_as_tgi_does_and_the_detail_beside_it(house: Any) -> None:
    for shard in ("prefill-0", "decode-1"):
        house.queue.set_state(shard, ShardState.DEAD)
    response = await house.http.get("/health?detail=1")
    assert response.status_code == 503
    error = {"error": "unhealthy", "error_type": "healthcheck"}
    assert response.json() == {**DETAIL, **error, "status": "unhealthy", "shards": {"ready": 0, "known": 2}}


async def test_status_tells_the_mode_in_full_and_whether_redis_answers(house: Any) -> None:
    house.queue.mode = mode_of(1, auto=False, reason="Host B is down.")
    told = (await house.http.get("/admin/status")).json()
    assert told["mode"] == {
        "level": 1,
        "name": "reduced",
        "output_cap": 512,
        "shed_below": None,
        "auto": False,
        "set_by": "operator",
        "reason": "Host B is down.",
    }
    assert told["redis"] is True
    house.queue.connected = False
    assert (await house.http.get("/admin/status")).json()["redis"] is False


async def test_status_tells_what_each_shard_costs(house: Any) -> None:
    costs = Costs(decode=DecodeCost(0.03, 0.0, 0.001))
    measured = dataclasses.replace(house.decode.view(), costs=costs)
    house.queue.set_shards([house.prefill.view(), measured])
    prefill, decode = (await house.http.get("/admin/status")).json()["shards"]
    assert prefill["costs"] is None
    assert decode["costs"]["decode"] == {"fixed_s": 0.03, "per_context_s": 0.0, "per_sequence_s": 0.001}
    assert decode["costs"]["figures"]["decode_step_one_ms"] == pytest.approx(31.0)


async def test_metrics_tell_level_and_redis(house: Any) -> None:
    house.queue.mode = mode_of(2)
    lines = (await house.http.get("/metrics")).text.splitlines()
    assert {"orchestrator_mode 2.0", "orchestrator_redis_up 1.0"} <= set(lines)
    house.queue.connected = False
    assert "orchestrator_redis_up 0.0" in (await house.http.get("/metrics")).text.splitlines()


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
@pytest.mark.parametrize("choice", list(Choice))
async def test_a_client_chooses_how_its_request_is_served(house: Any, path: str, choice: Choice) -> None:
    response = await house.http.post(path, json=BODY, headers={"x-orchestrator-choice": choice})
    assert (response.status_code, response.headers["x-orchestrator-route"]) == (200, choice)
    assert house.queue.tickets[0].choice == choice


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_also_on_the_openai_routes(house: Any, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello", "max_tokens": 20}
    response = await house.http.post(path, json=body, headers={"x-orchestrator-choice": "mixed"})
    assert (response.status_code, response.headers["x-orchestrator-route"]) == (200, "mixed")


async def test_without_the_header_the_deployment_chooses(house: Any) -> None:
    await house.http.post("/generate", json=BODY)
    assert house.queue.tickets[0].choice is None


async def test_what_cannot_be_split_is_mixed_whatever_the_client_chose(house: Any) -> None:
    body = {**BODY, "parameters": {"best_of": 2, "max_new_tokens": 20, "do_sample": True}}
    response = await house.http.post("/generate", json=body, headers={"x-orchestrator-choice": "separated"})
    assert response.headers["x-orchestrator-reason"] == "unsplittable"


@pytest.mark.parametrize("given", ["", "auto", "Mixed", "mixed ,separated"])
async def test_any_other_choice_is_refused_in_one_sentence(house: Any, given: str) -> None:
    response = await house.http.post("/generate", json=BODY, headers={"x-orchestrator-choice": given})
    assert (response.status_code, response.json()) == (
        422,
        {
            "error": "The header x-orchestrator-choice must be separated or mixed.",
            "error_type": "validation",
        },
    )
    assert house.queue.tickets == []
