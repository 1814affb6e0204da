"""The sidecar's routes: called as any ASGI server calls them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.sidecar.ranks import HANDLE, fingerprint
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    Limits,
    PullReply,
    PullRequest,
    Role,
    StatusReply,
    WaitReply,
)
from tgi_patches.sidecar import Sidecar
from tgi_patches.sidecar.app import BODY_LIMIT_BYTES, App, create_app, wait_arguments

STATUS = StatusReply(
    PROTOCOL_VERSION, "dep", "p0", Role.PREFILL, 1, fingerprint(1), Limits(10, 20), 100, 4, 65536, 16384, 32
)
PULL = {
    "protocol": PROTOCOL_VERSION,
    "handle": HANDLE,
    "shard": "p1",
    "epoch": 7,
    "address": "10.0.0.1:7001",
    "timeout_s": 2.5,
    "signature": "00",
}
PULLED = PullReply(PROTOCOL_VERSION, HANDLE, found=True, shard="d0.pulled", epoch=9, kv_bytes=96, seconds=0.5)


class Answers(Sidecar):
    """Of what stands behind the routes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.pulled: list[PullRequest] = []
        self.unhealthy = ""
        self.never = asyncio.Event()
        self.waits = False
        self.left = False

    def status(self) -> StatusReply:
        return STATUS

    async def wait(self, handle: str, timeout_s: float) -> WaitReply:
        self.asked.append((handle, timeout_s))
        await self._perhaps_for_ever()
        return WaitReply(PROTOCOL_VERSION, handle, found=True, first_token_id=5)

    async def pull(self, request: PullRequest) -> PullReply:
        self.pulled.append(request)
        await self._perhaps_for_ever()
        return PULLED

    async def _perhaps_for_ever(self) -> None:
        try:
            if self.waits:
                await self.never.wait()
        except asyncio.CancelledError:
            self.left = True
            raise


@pytest.fixture
async def answers() -> Answers:
    return Answers()


@pytest.fixture
def app(answers: Answers) -> App:
    return create_app(answers, answers, lambda: answers.unhealthy)


async def called(
    app: App,
    method: str,
    path: str,
    query: str = "",
    pieces: tuple[bytes, ...] = (b"",),
    *,
    leave: bool = False,
) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON, headers) of one request; status 0 where there is no answer."""
    events = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        if events:
            return events.pop(0)
        if not leave:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    await asyncio.wait_for(app(scope, receive, send), 10.0)
    if not sent:
        return 0, None, {}
    start, body = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert headers["content-length"] == str(len(body["body"]))
    return start["status"], json.loads(body["body"]), headers


async def test_status_is_the_contract_s_message(app: App) -> None:
    status, said, headers = await called(app, "GET", "/kv/status")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert StatusReply.from_dict(said) == STATUS


@pytest.mark.parametrize(
    ("query", "timeout_s"),
    [
        ("", 5.0),
        ("timeout_s=0.25", 0.25),
        ("timeout_s=-1", 0.0),
        ("timeout_s=1e9", 60.0),
        ("timeout_s=inf", 60.0),
    ],
)
async def test_wait_passes_handle_and_seconds_on(
    app: App, answers: Answers, query: str, timeout_s: float
) -> None:
    status, said, _ = await called(app, "GET", f"/kv/wait/{HANDLE}", query)
    assert status == 200
    assert WaitReply.from_dict(said) == WaitReply(PROTOCOL_VERSION, HANDLE, found=True, first_token_id=5)
    assert answers.asked == [(HANDLE, timeout_s)]


@pytest.mark.parametrize(
    ("handle", "query", "sentence"),
    [
        ("../../etc", "", "A KV handle must be 32 hexadecimal digits."),
        (HANDLE.upper(), "", "A KV handle must be 32 hexadecimal digits."),
        (HANDLE, "timeout_s=soon", "`timeout_s` must be a number of seconds, not 'soon'."),
        (HANDLE, "timeout_s=nan", "`timeout_s` must be a number of seconds, not 'nan'."),
    ],
)
async def test_a_wait_that_makes_no_sense_is_422(
    app: App, answers: Answers, handle: str, query: str, sentence: str
) -> None:
    status, said, _ = await called(app, "GET", f"/kv/wait/{handle}", query)
    assert (status, said) == (422, {"error": sentence, "error_type": "validation"})
    assert answers.asked == []


def test_a_query_that_is_no_text_is_refused_like_any_other() -> None:
    assert wait_arguments(HANDLE, b"other=\xff") == (HANDLE, 5.0)


async def test_a_pull_reaches_the_puller_whole(app: App, answers: Answers) -> None:
    text = json.dumps(PULL).encode()
    status, said, _ = await called(app, "POST", "/kv/pull", pieces=(text[:10], text[10:]))
    assert status == 200
    assert PullReply.from_dict(said) == PULLED
    assert answers.pulled == [
        PullRequest(PROTOCOL_VERSION, HANDLE, "p1", 7, "10.0.0.1:7001", timeout_s=2.5, signature="00")
    ]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "The body of a pull must be JSON."),
        (b"{", "The body of a pull must be JSON."),
        (b"\xff", "The body of a pull must be JSON."),
        (b"[" * 10_000, "The body of a pull must be JSON."),
        (b"[]", "The body of a pull must be a JSON object."),
        (
            PULL | {"handle": "x"},
            "A PullRequest message is not complete: A KV handle must be 32 hexadecimal digits.",
        ),
        (PULL | {"shard": "../p"}, "The shard name '../p' must be 1 to 64 characters"),
        (PULL | {"protocol": 9}, "The other side speaks protocol 9"),
        (PULL | {"epoch": "7"}, "The epoch of a pull must be an integer."),
        (PULL | {"epoch": True}, "The epoch of a pull must be an integer."),
        (PULL | {"address": 7}, "The address and the signature of a pull must be strings."),
        (PULL | {"signature": None}, "The address and the signature of a pull must be strings."),
        (PULL | {"timeout_s": 0}, "`timeout_s` of a pull must be a positive number of seconds."),
        (PULL | {"timeout_s": float("nan")}, "`timeout_s` of a pull must be a positive number of seconds."),
        (PULL | {"timeout_s": "5"}, "`timeout_s` of a pull must be a positive number of seconds."),
        ({"handle": HANDLE}, "A PullRequest message is not complete: "),
    ],
)
async def test_a_broken_pull_is_400_and_a_sentence(
    app: App, answers: Answers, body: bytes | dict[str, Any], sentence: str
) -> None:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, said, _ = await called(app, "POST", "/kv/pull", pieces=(text,))
    assert (status, said["error_type"]) == (400, "validation")
    assert sentence in said["error"]
    assert answers.pulled == []


async def test_a_body_over_the_limit_is_not_read_to_its_end(app: App, answers: Answers) -> None:
    pieces = (b" " * BODY_LIMIT_BYTES, b" ", b"never read")
    status, said, _ = await called(app, "POST", "/kv/pull", pieces=pieces)
    assert (status, said["error"]) == (413, "The body of a pull is larger than 16384 bytes.")
    exact = json.dumps(PULL).encode().ljust(BODY_LIMIT_BYTES)
    assert (await called(app, "POST", "/kv/pull", pieces=(exact,)))[0] == 200


async def test_health_is_200_or_why_not(app: App, answers: Answers) -> None:
    assert (await called(app, "GET", "/health"))[:2] == (200, {"status": "ok"})
    answers.unhealthy = "The server of rank 1 has not finished its warmup."
    status, said, _ = await called(app, "GET", "/health")
    assert (status, said) == (503, {"error": answers.unhealthy, "error_type": "unhealthy"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/kv/status", "GET"),
        ("GET", "/kv/pull", "POST"),
        ("DELETE", f"/kv/wait/{HANDLE}", "GET"),
        ("HEAD", "/health", "GET"),
    ],
)
async def test_another_method_is_405_and_says_which(app: App, method: str, path: str, allowed: str) -> None:
    status, said, headers = await called(app, method, path)
    assert (status, headers["allow"], said["error_type"]) == (405, allowed, "not_allowed")


@pytest.mark.parametrize("path", ["/", "/kv", "/kv/status/", "/metrics", "/kv/wait", ""])
async def test_anything_else_is_404(app: App, path: str) -> None:
    status, said, _ = await called(app, "GET", path)
    assert (status, said["error_type"]) == (404, "not_found")


@pytest.mark.parametrize("path", [f"/kv/wait/{HANDLE}", "/kv/pull"])
async def test_who_hangs_up_is_not_worked_for(app: App, answers: Answers, path: str) -> None:
    answers.waits = True
    method, body = ("POST", json.dumps(PULL).encode()) if path == "/kv/pull" else ("GET", b"")
    status, _, _ = await called(app, method, path, pieces=(body,), leave=True)
    assert (status, answers.left) == (0, True)


async def test_who_hangs_up_within_a_body_gets_nothing(app: App, answers: Answers) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        pytest.fail(f"nobody is there: {event}")

    await app({"type": "http", "method": "POST", "path": "/kv/pull", "query_string": b""}, receive, send)
    assert answers.pulled == []
