"""Keys, limits, priorities and the admin's door, as a client of a whole gateway meets them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from orchestrator.access import Access
from orchestrator.api.app import GatewaySettings, create_app
from orchestrator.core.ticket import Grant, Ticket
from orchestrator.queues import FakeQueue
from orchestrator.settings import GatewaySection
from orchestrator.shards.client import ShardClient
from orchestrator.shards.fake import FakeShard
from orchestrator.shards.script import Part
from tgi_patches.contract import Limits, Role

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"
LIMITS = Limits(max_input_tokens=400, max_total_tokens=500)
GENERATE = {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
PATIENCE_S = 20.0

Listening = Callable[[Any], AbstractAsyncContextManager[str]]


class Remembering(FakeQueue):
    """Keeps the tickets that were submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[Ticket] = []

    async def submit(self, ticket: Ticket) -> Grant:
        self.tickets.append(ticket)
        return await super().submit(ticket)


@dataclasses.dataclass
class Guarded:
    """A gateway that asks for keys, before a fake pair."""

    http: httpx.AsyncClient
    access: Access
    queue: Remembering
    prefill: FakeShard
    decode: FakeShard

    async def post(
        self, path: str = "/generate", *, key: str = KEY, body: Any = GENERATE, **headers: str
    ) -> httpx.Response:
        shown = {"authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=shown | headers)


GuardedBy = Callable[..., AbstractAsyncContextManager[Guarded]]


@pytest.fixture
def guarded(tmp_path: Path, listening: Listening) -> GuardedBy:
    """By the text of a keys file; keywords are of `GatewaySection`."""

    @asynccontextmanager
    async def build(keys: str, **section: Any) -> AsyncIterator[Guarded]:
        section["keys_file"] = written(tmp_path, keys)
        async with AsyncExitStack() as stack:
            shards = [FakeShard(str(role), role, limits=LIMITS) for role in (Role.PREFILL, Role.DECODE)]
            for shard in shards:
                shard.url = await stack.enter_async_context(listening(without_lifespan(shard)))
            access = Access.open(GatewaySection(**section), {})
            stack.callback(access.close)
            queue = Remembering()
            settings = GatewaySettings(limits=LIMITS, model_name="m")
            app = create_app(settings, queue=queue, shards=ShardClient(), access=access)
            url = await stack.enter_async_context(listening(app))
            http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)
            await stack.enter_async_context(http)
            queue.set_shards([shard.view() for shard in shards])
            yield Guarded(http, access, queue, *shards)

    return build


def written(folder: Path, keys: str) -> Path:
    file = folder / "keys.yaml"
    file.write_text(f"keys: {{{keys}}}", encoding="utf-8")
    file.chmod(0o600)
    return file


def without_lifespan(app: Any) -> Any:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await app(scope, receive, send)

    return call


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", GENERATE),
        ("/generate_stream", GENERATE),
        ("/", GENERATE),
        ("/v1/chat/completions", CHAT),
    ],
)
async def test_a_key_opens_what_generates_and_nothing_else_does(
    guarded: GuardedBy, path: str, body: Any
) -> None:
    async with guarded(f"team-a: {KEY}") as house:
        for key in ("", OTHER):
            response = await house.post(path, key=key, body=body)
            assert response.status_code == 401
            assert response.json()["error_type"] == "unauthorized"
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert "x-request-id" in response.headers
        assert house.queue.tickets == []
        assert (await house.post(path, body=body)).status_code == 200


async def test_information_and_health_need_no_key(guarded: GuardedBy) -> None:
    async with guarded(f"a: {KEY}") as house:
        for path in ("/health", "/ping", "/", "/info", "/v1/models", "/docs", "/metrics", "/admin/status"):
            assert (await house.http.get(path)).status_code == 200, path
        assert (await house.http.get("/generate")).status_code == 401
        shown = {"authorization": f"Bearer {KEY}"}
        assert (await house.http.get("/nothing", headers=shown)).status_code == 404


async def test_the_key_goes_no_further_and_stands_in_no_log(guarded: GuardedBy) -> None:
    with capture_logs() as logs:
        async with guarded(f"team-a: {KEY}") as house:
            await house.post()
            await house.post(key=OTHER)
            await house.post("/tokenize")
            seen = house.prefill.seen + house.decode.seen
    assert KEY not in str([one.headers for one in seen])
    assert KEY not in str(logs)
    assert OTHER not in str(logs)
    assert "team-a" in str([line for line in logs if line["event"] == "request"])


async def test_a_request_too_many_is_told_when_to_come_again(guarded: GuardedBy) -> None:
    async with guarded(f"a: {{key: {KEY}, requests_per_minute: 2}}, b: {OTHER}") as house:
        for _ in range(2):
            assert (await house.post()).status_code == 200
        response = await house.post()
        assert response.status_code == 429
        assert response.json() == {
            "error": "The API key a may ask 2 times a minute.",
            "error_type": "overloaded",
        }
        assert 55 < int(response.headers["retry-after"]) <= 65
        assert (await house.post(key=OTHER)).status_code == 200


async def test_a_client_that_leaves_makes_room_for_the_next_request_of_its_key(guarded: GuardedBy) -> None:
    async with guarded(f"a: {{key: {KEY}, concurrent_requests: 1}}") as house:
        gate = house.decode.hold(Part.GET, 2)
        first = asyncio.create_task(house.post("/generate_stream"))
        await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
        assert (await house.post()).status_code == 429
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(house.decode.left.wait(), PATIENCE_S)
        house.decode.heal()
        assert await _until_served(house) == 200
        assert (await house.post()).status_code == 200


async def _until_served(house: Guarded) -> int:
    """The gateway may hear of the leaving a moment after the shard."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            response = await house.post()
            if response.status_code != 429:
                return response.status_code


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_prompt_and_answer_are_charged_when_they_are_over(guarded: GuardedBy, path: str) -> None:
    async with guarded(f"a: {{key: {KEY}, tokens_per_minute: 14}}") as house:
        # Nine tokens of prompt and five of answer: the fake shard's script.
        assert (await house.post(path)).status_code == 200
        response = await house.post(path)
        assert response.status_code == 429
        assert response.json()["error"] == "The API key a has used its 14 tokens a minute."
    async with guarded(f"a: {{key: {KEY}, tokens_per_minute: 15}}") as house:
        assert [(await house.post(path)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_request_that_was_refused_for_its_body_is_not_under_way(guarded: GuardedBy) -> None:
    async with guarded(f"a: {{key: {KEY}, concurrent_requests: 1}}") as house:
        for _ in range(3):
            assert (await house.post(body={"inputs": ""})).status_code == 422
        assert (await house.post()).status_code == 200


async def test_the_priority_reaches_the_ticket_and_never_exceeds_the_keys_own(guarded: GuardedBy) -> None:
    async with guarded(f"a: {{key: {KEY}, priority: high}}, b: {OTHER}") as house:
        for key, word in ((KEY, "high"), (KEY, "low"), (OTHER, "high")):
            await house.post(key=key, **{"x-orchestrator-priority": word})
        await house.post()
        assert [ticket.priority for ticket in house.queue.tickets] == [1, -1, 0, 0]
        response = await house.post(**{"x-orchestrator-priority": "urgent"})
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")


async def test_keys_change_while_a_request_is_under_way(guarded: GuardedBy, tmp_path: Path) -> None:
    async with guarded(f"a: {{key: {KEY}, concurrent_requests: 1}}") as house:
        gate = house.decode.hold(Part.GET, 2)
        first = asyncio.create_task(house.post())
        await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
        written(tmp_path, f"b: {OTHER}")
        house.access.reload()
        assert (await house.post()).status_code == 401
        house.decode.heal()
        assert (await house.post(key=OTHER)).status_code == 200
        assert (await first).status_code == 200


async def test_with_an_address_of_its_own_administration_is_not_the_clients(guarded: GuardedBy) -> None:
    async with guarded(f"a: {KEY}", admin_listen="127.0.0.1:1") as house:
        for path in ("/metrics", "/admin/status"):
            response = await house.http.get(path)
            assert (response.status_code, response.json()["error_type"]) == (404, "not_found")


async def test_a_token_opens_the_administration_alone(guarded: GuardedBy, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("admin-0123456789abcdef")
    token.chmod(0o600)
    async with guarded(f"a: {KEY}", admin_token_file=token) as house:
        for secret, status in (("admin-0123456789abcdef", 200), (KEY, 401)):
            shown = {"authorization": f"Bearer {secret}"}
            assert (await house.http.get("/metrics", headers=shown)).status_code == status
        assert (await house.http.get("/admin/status")).status_code == 401
        assert (await house.post(key="admin-0123456789abcdef")).status_code == 401
