"""What a stock TGI and a deployment must share before their answers are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from orchestrator.errors import Unreachable
from orchestrator.verify.ground import LIMITS, ROUTES, TEXTS, Check, common_ground

INFO = {
    "model_id": "org/tiny",
    "model_sha": "a" * 40,
    "version": "3.3.7",
    "max_concurrent_requests": 128,
    **dict.fromkeys(LIMITS, 100),
}


@dataclass
class Server:
    """Serves every route but `missing`; a token for each character."""

    info: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    shift_from: str = ""
    """From the first text with this in it on, ids are others."""
    asked: list[tuple[str, str]] = field(default_factory=list)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._respond), base_url="http://tgi")

    def _respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append((request.method, path))
        if path in self.missing:
            return httpx.Response(404)
        if path == "/info":
            return httpx.Response(200, json=INFO | self.info)
        if path == "/tokenize":
            text = json.loads(request.content)["inputs"]
            shift = 1 if self.shift_from and self.shift_from in text else 0
            return httpx.Response(
                200, json=[{"id": ord(char) + shift * (at == 2)} for at, char in enumerate(text)]
            )
        return httpx.Response(200, json={})


async def checked(ours: Server, theirs: Server) -> dict[str, Check]:
    seen: list[Check] = []
    async with ours.client() as left, theirs.client() as right:
        done = await common_ground(left, right, seen.append)
    assert seen == done
    return {check.what: check for check in done}


def problems(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.problem for name, check in checks.items() if not check.ok}


async def test_equal_servers_share_everything() -> None:
    ours, theirs = Server(), Server()
    checks = await checked(ours, theirs)
    assert problems(checks) == {}
    assert list(checks) == ["model", "revision", *LIMITS, "version", "routes", "token ids"]
    assert {(method, path) for method, path, _ in ROUTES} <= set(theirs.asked) == set(ours.asked)
    assert checks["token ids"].separated == f"{sum(map(len, TEXTS.values()))} in {len(TEXTS)} texts"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("org/tiny", "org/tiny", True),
        ("org/tiny", "fork/tiny", False),
        ("tiny", "org/tiny", True),
        ("/models/tiny", "/data/tiny", True),
        ("/models/tiny", "org/tiny", True),
        ("/models/tiny", "/models/other", False),
    ],
)
async def test_models_are_the_same_by_id_or_by_the_name_of_their_folder(
    one: str, other: str, same: bool
) -> None:
    checks = await checked(Server({"model_id": one}), Server({"model_id": other}))
    assert checks["model"].ok is same
    if not same:
        assert list(checks) == ["model"], "nothing else is compared"
        assert checks["model"].problem == (
            f"The models differ: the deployment serves {one}, the reference {other}."
        )


@pytest.mark.parametrize(
    ("one", "other", "ok"),
    [("a" * 40, "b" * 40, False), (None, "b" * 40, True), ("a" * 16, "b" * 40, True), (None, None, True)],
)
async def test_revisions_differ_only_where_both_tell_a_commit(
    one: str | None, other: str | None, ok: bool
) -> None:
    checks = await checked(Server({"model_sha": one}), Server({"model_sha": other}))
    assert checks["revision"].ok is ok


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_lower_limit_would_refuse_clients_and_a_higher_one_would_not(limit: str) -> None:
    assert problems(await checked(Server({limit: 101}), Server())) == {}
    assert problems(await checked(Server({limit: 99}), Server())) == {
        limit: f"{limit} is 99 here and 100 there: requests that are served now would be refused."
    }
    assert problems(await checked(Server({limit: 1}), Server({limit: None}))) == {}


async def test_a_route_that_only_the_reference_serves_is_named() -> None:
    found = problems(await checked(Server(missing=("/v1/completions", "/ping")), Server(missing=("/ping",))))
    assert found == {
        "routes": "Routes that the reference serves are missing: POST /v1/completions answers 404."
    }


async def test_another_tokenizer_is_told_by_text_and_token() -> None:
    found = problems(await checked(Server(shift_from=TEXTS["greek"]), Server()))
    theirs = ord(TEXTS["greek"][2])
    assert found == {
        "token ids": "The tokenizers differ, first in the text 'greek' at token 2: "
        f"{theirs + 1} here, {theirs} at the reference."
    }


async def test_a_server_without_info_is_not_a_tgi() -> None:
    with pytest.raises(Unreachable, match=r"http://tgi answers /info with status 404\."):
        await checked(Server(), Server(missing=("/info",)))
