"""`degrade`: what cannot be meant is refused before anybody is asked, and whose Redis it asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrator.cli import app
from orchestrator.commands.degrade import Wish, redis_url_of, refused, wanted_mode
from orchestrator.config import load_settings
from orchestrator.core.decision import Mode
from orchestrator.core.degraded import mode_of
from orchestrator.deployment.state import State, StateFolder, started_ticks
from orchestrator.errors import ConfigError, Unreachable
from tgi_patches.contract import Role, ShardSpec


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCHESTRATOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["degrade", *arguments])


def runs(redis_url: str) -> None:
    """A deployment `blue` runs here with this Redis, as its state file shows it."""
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    spec = ShardSpec("blue", "prefill-0", Role.PREFILL, "/m", "tiny")
    ticks = started_ticks(os.getpid()) or 0
    folder.write(State("blue", os.getpid(), ticks, "http://x", redis_url, "tiny", "float32", "/a", (spec,)))


def found(flag: str | None = None, env: dict[str, str] | None = None) -> str:
    return redis_url_of(load_settings(None, {"deployment": "blue", "redis.url": flag}, env or {}))


LEVELS = "0 normal, 1 reduced, 2 tight, 3 minimal, 4 shedding"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--to", "5"), f"There is no level '5': there are {LEVELS}."),
        (("--to", "-1"), f"There is no level '-1': there are {LEVELS}."),
        (("--to", "²"), f"There is no level '²': there are {LEVELS}."),
        (("--to", "Tight"), f"There is no level 'Tight': there are {LEVELS}."),
        (("--to", ""), f"There is no level '': there are {LEVELS}."),
        (("--to", "1", "--auto"), "--to sets a level and --auto gives it back: name one of them."),
        (("--reason", "Why not."), "--reason belongs to --to."),
        (("--to", "1", "--reason", "a\nb"), "--reason must be one line of at most 200 characters."),
        (("--to", "1", "--reason", "a" * 201), "--reason must be one line of at most 200 characters."),
    ],
)
def test_flags_that_cannot_be_meant_are_one_sentence(flags: tuple[str, ...], said: str) -> None:
    result = run("--deployment", "blue", *flags)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{said}\n")


def test_a_level_goes_by_number_and_by_name() -> None:
    assert (
        wanted_mode(Wish(to="3"))
        == wanted_mode(Wish(to="minimal"))
        == Mode(3, 128, None, False, "An operator set it.")
    )
    assert wanted_mode(Wish(to="0", reason="All is well.")) == Mode(0, None, None, False, "All is well.")
    assert wanted_mode(Wish(auto=True)) is wanted_mode(Wish()) is None


def test_a_deployment_that_does_not_run_here_is_unreachable() -> None:
    result = run("--deployment", "blue", "--to", "1")
    assert (result.exit_code, result.stderr) == (
        3,
        "No deployment 'blue' runs here: start one with `tgi-orchestrator up`.\n",
    )


def test_a_redis_that_does_not_answer_is_unreachable() -> None:
    result = run("--deployment", "blue", "--redis", "redis://127.0.0.1:1/0")
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1


def test_the_running_deployments_redis_goes_before_that_of_the_settings_and_a_flag_before_both() -> None:
    other = {"ORCHESTRATOR_REDIS__URL": "redis://other:6379/0"}
    with pytest.raises(Unreachable):
        found()
    assert found(env=other) == "redis://other:6379/0"
    runs("unix:///run/r.sock")
    assert found() == found(env=other) == "unix:///run/r.sock"
    assert found("redis://flag:6379/0", other) == "redis://flag:6379/0"


def test_a_password_that_the_state_file_hides_comes_from_the_settings() -> None:
    runs("redis://:***@host:6379/0")
    with pytest.raises(ConfigError, match="has a password, which is not written down"):
        found()
    with pytest.raises(ConfigError, match="--redis"):
        found(env={"ORCHESTRATOR_REDIS__URL": "redis://:secret@elsewhere:6379/0"})
    assert found(env={"ORCHESTRATOR_REDIS__URL": "redis://:secret@host:6379/0"}) == (
        "redis://:secret@host:6379/0"
    )


def test_who_is_refused_is_named_by_priority() -> None:
    assert [refused(mode_of(level)) for level in range(5)] == [[], [], [], [], ["low"]]
    assert refused(Mode(shed_below=1)) == ["low", "normal"]
    assert refused(Mode(shed_below=-1)) == []
