"""What a sidecar process is told: by its environment, or a sentence; and how it shows that it lives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sidecar.ranks import spec_in
from tgi_patches.contract import EPOCH_VARIABLE, KEY_VARIABLE, ContractError, MissReason, PullRequest
from tgi_patches.key import listen_address
from tgi_patches.sidecar.heartbeat import beating, begin, heartbeat_path, last_beat
from tgi_patches.sidecar.pulls import AwaitedPuller, AwaitedSource
from tgi_patches.sidecar.serve import Order

SPEC = spec_in(Path("/arenas"), port=8080, sidecar_port=8081)
ENV = SPEC.to_env() | {EPOCH_VARIABLE: "77"}


def test_an_order_is_read_from_the_environment() -> None:
    assert Order.from_env(ENV) == Order(SPEC, 77, b"", 8080)
    told = Order.from_env(ENV | {"PORT": "3000", KEY_VARIABLE: "0123456789abcdef"})
    assert (told.router_port, told.key) == (3000, b"0123456789abcdef")


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, "The variable ORCHESTRATOR_SHARD_SPEC is not set."),
        (SPEC.to_env(), "The variable ORCHESTRATOR_SHARD_EPOCH must hold the epoch of the shard's server."),
        (ENV | {EPOCH_VARIABLE: "-1"}, "ORCHESTRATOR_SHARD_EPOCH must hold the epoch"),
        (ENV | {"PORT": "http"}, "The variable PORT must be a number, not 'http'."),
        (ENV | replace(SPEC, arena_dir="").to_env(), "the spec has no arena_dir."),
        (ENV | {KEY_VARIABLE: "too short"}, "The deployment's key must have at least 16 bytes."),
    ],
)
def test_an_environment_that_is_not_enough_is_a_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(ContractError) as refused:
        Order.from_env(env)
    assert sentence in str(refused.value)
    assert "too short" not in str(refused.value)


KEYED = {KEY_VARIABLE: "0123456789abcdef"}
NO_KEY = "can be reached from other hosts: name the deployment's key in ORCHESTRATOR_DEPLOYMENT_KEY_FILE."


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"pull_listen": "10.0.0.1:3101"}, "10.0.0.1:3101"),
        ({"pull_listen": "[::]:0"}, ":::0"),
        ({"pulled_bytes": 1, "host": "0.0.0.0"}, "0.0.0.0:8081"),
    ],
)
def test_records_are_neither_offered_nor_fetched_for_others_without_a_key(
    changes: dict[str, Any], address: str
) -> None:
    env = ENV | replace(SPEC, **changes).to_env()
    with pytest.raises(ContractError) as refused:
        Order.from_env(env)
    assert str(refused.value) == f"{address} {NO_KEY}"
    assert Order.from_env(env | KEYED).spec == replace(SPEC, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pull_listen": "127.0.0.1:3101", "pulled_bytes": 1},
        {"pull_listen": "[::1]:3101", "host": "0.0.0.0"},
    ],
)
def test_without_a_key_a_sidecar_still_serves_its_own_host(changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    assert Order.from_env(ENV | spec.to_env()).spec == spec


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:7001", ("0.0.0.0", 7001)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_where_to_offer_records(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize("text", ["7001", ":7001", "host:", "host:x", "host:65536", "host:-1"])
def test_an_address_that_is_none_is_a_sentence(text: str) -> None:
    with pytest.raises(ContractError, match="pull_listen must be host:port, not "):
        listen_address(text)


async def test_nothing_is_pulled_or_offered_before_the_warmup() -> None:
    request = PullRequest(1, "0" * 32, "p1", 7, "127.0.0.1:1")
    puller = AwaitedPuller(replace(SPEC, pulled_bytes=1 << 20), lambda: None, b"")
    reply = await puller.pull(request)
    assert (reply.found, reply.reason, reply.handle) == (False, MissReason.UNSUPPORTED, "0" * 32)
    assert AwaitedSource(SPEC, 77, lambda: None).digest == 0


async def test_a_shard_that_pulls_nothing_says_so_without_asking_what_it_holds() -> None:
    puller = AwaitedPuller(SPEC, lambda: pytest.fail("not needed"), b"")
    assert (await puller.pull(PullRequest(1, "0" * 32, "p1", 7, "127.0.0.1:1"))).reason == "unsupported"


async def test_a_heart_beats_until_it_is_told_to_stop(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, "dep", "p0")
    assert path == tmp_path / "dep" / "p0.sidecar"
    assert last_beat(path) == 0
    path.parent.mkdir()
    begin(path, {"pid": 5, "epoch": 77})
    assert json.loads(path.read_text()) == {"pid": 5, "epoch": 77}
    assert [found.name for found in path.parent.iterdir()] == ["p0.sidecar"]
    seen = {last_beat(path)}
    heart = asyncio.create_task(beating(path, every_s=0.001))
    async with asyncio.timeout(10.0):
        while len(seen) < 3:
            await asyncio.sleep(0.005)
            seen.add(last_beat(path))
    heart.cancel()
    with pytest.raises(asyncio.CancelledError):
        await heart


async def test_a_heart_whose_file_is_gone_stops_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await beating(tmp_path / "gone")
