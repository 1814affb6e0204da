"""`degrade` on a real Redis: with a gateway that follows, with a conductor that must not interfere, alone."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrator.cli import app
from orchestrator.core.decision import Mode
from orchestrator.core.degraded import mode_of
from orchestrator.core.shard import ShardState
from orchestrator.deployment.state import State, StateFolder, started_ticks
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues import wire
from orchestrator.queues.mode import ModeKey, by_leader
from tgi_patches.contract import Role, ShardSpec


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCHESTRATOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def degrade(world: Any, *arguments: str) -> Result:
    """In a thread, since the command runs a loop of its own."""
    flags = ["degrade", "--deployment", "test", "--redis", world.server.url, *arguments]
    result = await asyncio.to_thread(CliRunner().invoke, app, flags)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


async def told(world: Any, *arguments: str) -> dict[str, Any]:
    result = await degrade(world, "--json", *arguments)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


async def kept(world: Any) -> Mode | None:
    text = await world.redis.get(world.keys.mode)
    return None if text is None else wire.mode(text)


def half(world: Any) -> tuple[Any, ...]:
    """A prefill shard and two decode shards, one of them dead."""
    dead = world.shards.ready("d1", Role.DECODE)
    return (*world.shards.pair(), type(dead)("d1", Role.DECODE, dead.url, ShardState.DEAD, dead.status))


async def test_a_level_that_an_operator_sets_reaches_every_gateway(world: Any, until: Any) -> None:
    await world.leader()
    gateway = await world.gateway()
    answer = await told(world, "--to", "minimal", "--reason", "Maintenance of host B.")
    assert answer["changed"] is True
    assert (answer["before"]["level"], answer["mode"]["level"]) == (0, 3)
    expected = Mode(3, output_cap=128, shed_below=None, auto=False, reason="Maintenance of host B.")
    await until(lambda: gateway.mode == expected)
    assert (await told(world))["mode"]["set_by"] == "operator"


async def test_it_needs_no_conductor(world: Any, until: Any) -> None:
    gateway = await world.gateway()
    answer = await told(world, "--to", "4")
    assert answer["conductor"] is None
    await until(lambda: gateway.mode.shed_below == 0)
    assert "No conductor leads" in (await degrade(world)).stdout


async def test_a_dry_run_tells_both_and_changes_nothing(world: Any) -> None:
    await world.leader(*half(world))
    answer = await told(world, "--to", "4", "--dry-run")
    assert (answer["changed"], answer["mode"]["level"], answer["mode"]["shed_below"]) == (False, 4, 0)
    assert (answer["by_itself"]["level"], answer["by_itself"]["output_cap"]) == (1, 512)
    assert answer["load"] == "50 % of the decode capacity was ready."
    assert await kept(world) is None
    text = (await degrade(world, "--to", "4", "--dry-run")).stdout
    assert "would be shedding (level 4); nothing was changed" in text
    assert "at most 128 tokens" in text
    assert "requests of priority low" in text
    assert "it would be reduced (level 1) now: 50 % of the decode capacity was ready." in text


async def test_without_flags_it_only_looks(world: Any) -> None:
    await world.leader()
    before = await world.redis.keys("*")
    text = (await degrade(world)).stdout
    assert "test is normal (level 0)" in text
    assert "nobody" in text
    assert "the conductor, by itself" in text, "nobody has ever set one"
    assert sorted(await world.redis.keys("*")) == sorted(before)
    await told(world, "--to", "2", "--reason", "Tests [today].")
    text = (await degrade(world)).stdout
    assert "tight (level 2)" in text
    assert "Tests [today]." in text
    assert "an operator" in text


async def test_auto_gives_the_level_back_and_is_at_once_what_the_capacity_asks_for(world: Any) -> None:
    await world.leader(*half(world))
    await told(world, "--to", "4")
    answer = await told(world, "--auto")
    assert (answer["before"]["level"], answer["mode"]["level"]) == (4, 1)
    assert await kept(world) == Mode(1, 512, None, True, "50 % of the decode capacity was ready.")
    assert (await told(world, "--auto"))["changed"] is False
    assert "by itself  it would" not in (await degrade(world)).stdout, "it is so already"


async def test_a_leader_sets_the_mode_until_an_operator_does(world: Any) -> None:
    leader = await world.leader()

    async def proposes(level: int, leading: str) -> str:
        command = by_leader(world.keys, leading, mode_of(level, reason="Because."))
        answer: str = await world.redis.execute_command(*command)
        return answer

    assert await proposes(2, leader.leader) == "set"
    assert await kept(world) == Mode(2, 256, None, True, "Because.")
    assert await proposes(3, "another:1") == "fenced"
    assert (await kept(world)) == Mode(2, 256, None, True, "Because.")
    await told(world, "--to", "1")
    assert await proposes(3, leader.leader) == "held"
    assert await kept(world) == Mode(1, 512, None, False, "An operator set it.")
    await told(world, "--auto")
    assert await proposes(3, leader.leader) == "set"


async def test_a_mode_that_cannot_be_read_is_replaced(world: Any) -> None:
    leader = await world.leader()
    for broken in ("{broken", "7", '"auto"'):
        await world.redis.set(world.keys.mode, broken)
        assert await world.redis.execute_command(*by_leader(world.keys, leader.leader, mode_of(1))) == "set"


async def test_a_redis_that_does_not_know_the_deployment_is_left_untouched(world: Any) -> None:
    result = await degrade(world, "--to", "3")
    assert (result.exit_code, result.stderr) == (3, "This Redis holds no deployment 'test'.\n")
    assert await world.redis.keys("*") == []


async def test_another_schema_is_refused(world: Any) -> None:
    await world.redis.set(world.keys.schema, "99")
    with pytest.raises(ConfigError, match="in schema 99"):
        async with ModeKey(world.server.url, "test"):
            pass


async def test_a_redis_that_is_gone_is_unreachable(world: Any) -> None:
    await world.stop_redis()
    assert (await degrade(world, "--to", "3")).exit_code == 3
    with pytest.raises(Unreachable):
        async with ModeKey(world.server.url, "test"):
            pass
    await world.start_redis()


async def test_the_redis_of_a_deployment_that_runs_here_is_found(world: Any, tmp_path: Path) -> None:
    await world.leader()
    folder = StateFolder.of("test", os.environ)
    folder.create()
    spec = ShardSpec("test", "prefill-0", Role.PREFILL, "/m", "tiny")
    ticks = started_ticks(os.getpid()) or 0
    url = world.server.url
    folder.write(State("test", os.getpid(), ticks, "http://x", url, "tiny", "float32", "/a", (spec,)))
    result = await asyncio.to_thread(CliRunner().invoke, app, ["degrade", "-d", "test", "--to", "1"])
    assert result.exit_code == 0, result.output
    assert (await kept(world)) == Mode(1, 512, None, False, "An operator set it.")
