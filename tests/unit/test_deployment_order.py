"""Before anything runs: the lock, the port, the model, the room; and what killed deployments left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.config import Loaded, load_settings
from orchestrator.deployment.arena import free_bytes, remove_arenas
from orchestrator.deployment.progress import Lines
from orchestrator.deployment.start import Order, ordered
from orchestrator.deployment.state import State, StateFolder
from orchestrator.errors import ConfigError
from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, Role, ShardSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model, as far as can be seen without loading it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "arena"


def loaded(model: Path, arena: Path, **flags: object) -> Loaded:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    base = {"model.id": str(model), "arena.dir": str(arena), "gateway.listen": "127.0.0.1:0"}
    return load_settings(None, base | {"deployment": "blue"} | named, {})


def order(settings: Loaded) -> Order:
    with ordered(settings, Lines()) as made:
        return made


def folder_of(name: str) -> StateFolder:
    return StateFolder.of(name, os.environ)


def left_behind(name: str, arena: Path) -> Path:
    """What a killed `up` leaves: a state file of a process that is gone, and an arena file."""
    folder = folder_of(name)
    folder.create()
    spec = ShardSpec(name, "prefill-0", Role.PREFILL, "/m", "tiny")
    folder.write(State(name, os.getpid(), 1, "http://x", "redis://x", "tiny", "float32", str(arena), (spec,)))
    file = arena / name / "prefill-0.0.arena"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    return file


def test_an_order_names_shards_limits_and_logs(model: Path, arena: Path) -> None:
    made = order(loaded(model, arena))
    assert made.deployment == "blue"
    assert set(made.log_files()) == {"prefill-0", "decode-0", "conductor", "gateway"}
    assert (made.plan.max_input_tokens, made.plan.max_total_tokens) == (4095, 4096)


def test_lock_and_port_are_given_back(model: Path, arena: Path) -> None:
    first = order(loaded(model, arena))
    second = order(loaded(model, arena))
    assert first.sockets.clients.fileno() == second.sockets.clients.fileno() == -1


def test_rings_larger_than_the_tmpfs_are_refused(model: Path, arena: Path) -> None:
    with pytest.raises(ConfigError, match=r"^The KV arenas need [\d,]+ MiB and .* has [\d,]+ MiB free"):
        order(loaded(model, arena, arena__bytes=2 * free_bytes(arena)))


def test_what_a_killed_start_left_is_removed_by_the_next_one(model: Path, arena: Path) -> None:
    stale = left_behind("blue", arena)
    order(loaded(model, arena))
    assert not stale.exists()
    assert folder_of("blue").read() is None


def test_what_other_killed_deployments_left_is_removed_too_but_not_what_runs(
    model: Path, arena: Path
) -> None:
    dead, temporary, starting = (left_behind(name, arena) for name in ("green", "verify-7", "red"))
    with folder_of("red").locked():
        order(loaded(model, arena))
    assert (dead.exists(), temporary.exists(), starting.exists()) == (False, False, True)
    assert folder_of("green").path.exists()
    assert not folder_of("verify-7").path.exists()


def test_removing_arenas_touches_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "blue").mkdir()
    for name in ("a.0.arena", "notes.txt"):
        (tmp_path / "blue" / name).write_text("x")
    remove_arenas(tmp_path, "blue")
    assert [path.name for path in (tmp_path / "blue").iterdir()] == ["notes.txt"]
    (tmp_path / "blue" / "notes.txt").unlink()
    remove_arenas(tmp_path, "blue")
    remove_arenas(tmp_path, "blue")
    assert not tmp_path.exists()


def test_free_room_is_that_of_the_file_system_a_folder_would_be_on(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.01)


def test_every_deployment_has_a_key_which_stays_when_it_starts_again(
    model: Path, arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (KEY_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    first, second = order(loaded(model, arena)), order(loaded(model, arena))
    own = folder_of("blue").path / "key"
    assert first.key_env == second.key_env == {KEY_FILE_VARIABLE: str(own)}
    given = tmp_path / "given"
    given.write_text("a key of enough bytes")
    own.unlink()
    assert order(loaded(model, arena, key_file=str(given))).key_env == {KEY_FILE_VARIABLE: str(given)}
    assert not own.exists()
