"""`apply` and `drain` on a real Redis, with a conductor that follows and shards that are only names."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orchestrator.cli import app
from orchestrator.commands.apply import Planner, Wish, apply_settings
from orchestrator.config import load_settings
from orchestrator.core.roll import RollState
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.deployment.logging import json_log
from orchestrator.deployment.state import State, StateFolder, started_ticks
from orchestrator.errors import ConfigError, OrchestratorError, Unreachable
from orchestrator.shards.static import StaticLauncher
from tgi_patches.contract import ShardSpec

from .fleet import SPECS, Fleet, Until, World, knows, ready_gateway, running

P0, D0 = SPECS
NEW = replace(D0, max_concurrent_requests=64)


class Steps:
    """What a terminal would show."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def step(self, text: str) -> None:
        """Comes and goes."""

    def done(self, text: str) -> None:
        self.all.append(text)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("ORCHESTRATOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with json_log(tmp_path / "conductor.log"):  # which is a process of its own elsewhere
        yield


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


def runs(world: World, urls: dict[str, str] | None = None, **flags: Any) -> None:
    """As `up` writes it down: deployment `test` runs here with these settings."""
    folder = StateFolder.of("test", os.environ)
    folder.create()
    given = {name.replace("__", "."): value for name, value in flags.items()}
    settings = load_settings(None, {"deployment": "test"} | given, {}).told()
    known = (os.getpid(), started_ticks(os.getpid()) or 0, "http://x", world.server.url)
    folder.write(State("test", *known, "m", "float32", "/a", (P0, D0), urls=urls or {}, settings=settings))


async def drain(world: World, *arguments: str) -> Result:
    flags = ["drain", "--deployment", "test", "--redis", world.server.url, *arguments]
    result = await asyncio.to_thread(CliRunner().invoke, app, flags)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


async def apply(
    orders: Sequence[ShardSpec], *, dry_run: bool = False, as_json: bool = False, **flags: Any
) -> Steps:
    """In a thread, since the command runs a loop of its own."""
    given = {name.replace("__", "."): value for name, value in flags.items()}
    loaded, steps = load_settings(None, {"deployment": "test"} | given, {}), Steps()
    planner: Planner = lambda _loaded, _progress: orders  # noqa: E731
    await asyncio.to_thread(
        lambda: apply_settings(loaded, Wish(dry_run, 30.0), planner, steps, as_json=as_json)
    )
    return steps


# --- drain --------------------------------------------------------------------------------------


async def test_a_drained_shard_is_idle_when_its_requests_are_done_and_serves_again_after(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet) as conductor:
        queue = await ready_gateway(world, until)
        ticket = world.shards.ticket(queue)
        await queue.submit(ticket)
        first = await drain(world, "p0", "--wait", "--timeout", "0.5")
        assert first.exit_code == 1
        assert first.stdout == "Shard p0 is drained and gets nothing new; 1 request ends first.\n"
        assert first.stderr == (
            "Shard p0 still has 1 request after 0.5 s: they go on, and it gets nothing new.\n"
        )
        waiting = asyncio.create_task(drain(world, "p0", "--wait"))
        await until(knows(queue, p0="draining", d0="ready"))
        await queue.complete(Completion(ticket.handle, Outcome.DONE))
        idle = await waiting
        assert (idle.exit_code, idle.stderr) == (0, "")
        assert idle.stdout == "Shard p0 was drained already and gets nothing new; it is idle.\n"
        assert "drained by an operator" in conductor.snapshot().shards[0].problem
        back = await drain(world, "p0", "--undo", "--json")
        assert json.loads(back.stdout) == {
            "deployment": "test",
            "shard": "p0",
            "drained": False,
            "changed": True,
            "requests": 0,
            "idle": False,
            "warning": "",
        }
        await until(knows(queue, p0="ready", d0="ready"))
        assert "was not drained: it serves" in (await drain(world, "p0", "--undo")).stdout
    assert sorted(fleet.launcher.stopped) == ["d0", "p0"]


async def test_the_last_shard_that_decodes_may_be_drained_with_a_warning(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        await ready_gateway(world, until)
        result = await drain(world, "d0")
        assert result.exit_code == 0
        assert result.stderr == (
            "No other shard that decodes is ready: until d0 is given back with --undo, "
            "requests go whole to prefill shards, or wait.\n"
        )


async def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        await ready_gateway(world, until)
        unknown = await drain(world, "decode-9")
        assert unknown.exit_code == 2
        assert unknown.stderr == "There is no shard 'decode-9' in this deployment: there are d0, p0.\n"
        both = await drain(world, "d0", "--undo", "--wait")
        assert both.exit_code == 2
        assert await world.redis.exists(world.keys.drained) == 0


async def test_without_a_conductor_it_is_said_that_nothing_happens_yet(world: World) -> None:
    leader = await world.leader()
    await leader.resign()
    result = await drain(world, "d0")
    assert (result.exit_code, result.stderr) == (0, "No conductor leads: nothing happens until one does.\n")
    assert (await drain(world, "d0", "--wait", "--timeout", "0")).exit_code == 1
    await world.stop_redis()
    assert (await drain(world, "d0")).exit_code == 3
    await world.start_redis()


# --- apply --------------------------------------------------------------------------------------


async def test_a_changed_shard_is_told_then_rolled(
    world: World, fleet: Fleet, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(world, fleet) as conductor:
        await ready_gateway(world, until)
        await until(lambda: world.redis.exists(world.keys.orders))
        runs(world)
        await apply([P0, NEW], dry_run=True, gateway__workers=2)
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
            "test: 1 changed, 1 as they are",
            "~ d0",
            "    max_concurrent_requests: 128 -> 64",
            "gateway.workers: 1 -> 2 only with a restart of `up`",
            "Nothing was changed (--dry-run).",
        ]
        assert await world.redis.exists(world.keys.wanted) == 0
        steps = await apply([P0, NEW])
        assert steps.all == ["Shard decode-0 is ready", "Shard d0 is stopped"]
        assert [one.shard for one in conductor.snapshot().shards] == ["p0", "decode-0"]
        capsys.readouterr()
        assert (await apply([P0, NEW])).all == []
        assert "Nothing to do" in capsys.readouterr().out


async def test_as_json_it_tells_the_difference_and_the_roll(
    world: World, fleet: Fleet, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(world, fleet):
        await ready_gateway(world, until)
        await until(lambda: world.redis.exists(world.keys.orders))
        runs(world)
        await apply([P0, D0, replace(D0, shard="d1")], as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert told["shards"] == {
            "added": [{"shard": "d1", "role": "decode"}],
            "removed": [],
            "changed": [],
            "same": ["p0", "d0"],
        }
        assert (told["deployment"], told["dry_run"], told["restart"]) == ("test", False, [])
        assert (told["roll"]["state"], told["roll"]["done"]) == ("done", ["Shard d1 is ready."])
        await apply([P0, D0, replace(D0, shard="d1")], as_json=True)
        assert json.loads(capsys.readouterr().out)["roll"] is None


async def test_a_roll_that_fails_is_an_error_and_going_back_makes_it_good(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet, room_for=lambda _: "GPU-1 is taken by deployment blue") as conductor:
        queue = await ready_gateway(world, until)
        await until(lambda: world.redis.exists(world.keys.orders))
        runs(world)
        more = [P0, D0, replace(D0, shard="d1")]
        said = "There is no room for shard d1: GPU-1 is taken by deployment blue."
        with pytest.raises(OrchestratorError, match="The roll stopped, and the other shards go on") as caught:
            await apply(more)
        assert str(caught.value).endswith(said)
        assert caught.value.exit_code == 1
        assert await apply([P0, D0])
        await until(lambda: conductor.snapshot().roll.state is RollState.DONE)
        assert knows(queue, p0="ready", d0="ready")()


async def test_what_old_and_new_shards_must_share_is_refused_before_anything_is_planned(
    world: World, fleet: Fleet, until: Until
) -> None:
    async with running(world, fleet):
        await ready_gateway(world, until)
        runs(world)
        with pytest.raises(ConfigError, match=r"^model\.id and model\.dtype differ from what runs.*`down`"):
            await apply([], model__id="other/model", model__dtype="float32")
        assert await world.redis.exists(world.keys.wanted) == 0


async def test_shards_that_others_keep_stay(world: World, fleet: Fleet, until: Until) -> None:
    kept = {"p0": "http://p0/7"}
    launcher = StaticLauncher(kept, fleet.launcher)
    async with running(world, fleet, launcher=launcher) as conductor:
        await ready_gateway(world, until)
        await until(lambda: world.redis.exists(world.keys.orders))
        runs(world, urls=kept)
        await apply([NEW])  # the planner names only what is launched
        assert [one.shard for one in conductor.snapshot().shards] == ["p0", "decode-0"]
        assert fleet.launcher.launches == {"d0": 1, "decode-0": 1}


async def test_without_deployment_or_conductor_nobody_would_follow(world: World) -> None:
    with pytest.raises(Unreachable, match="No deployment 'test' runs here"):
        await apply([P0])
    leader = await world.leader()
    await leader.resign()
    runs(world)
    with pytest.raises(Unreachable, match="No conductor leads"):
        await apply([P0])
