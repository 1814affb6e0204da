"""The deployment's key: made once, found by its path, and never part of what is shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from orchestrator.config import Loaded, load_settings
from orchestrator.deployment.environment import child_env
from orchestrator.deployment.key import key_env, minted
from orchestrator.deployment.state import StateFolder
from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, ContractError
from tgi_patches.key import key_from

SECRET = "correct horse battery staple"


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    made = StateFolder(tmp_path / "blue")
    made.create()
    return made


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "given"
    path.write_text(SECRET)
    return path


def settings(**flags: object) -> Loaded:
    return load_settings(None, flags, {})


def test_a_key_of_32_random_bytes_is_made_once_for_its_owner_only(folder: StateFolder) -> None:
    env = minted(folder)
    path = Path(env[KEY_FILE_VARIABLE])
    assert path.parent == folder.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = key_from(env)
    assert len(bytes.fromhex(key.decode())) == 32
    assert key_from(minted(folder)) == key
    other = StateFolder(folder.path.with_name("green"))
    other.create()
    assert key_from(minted(other)) != key


def test_a_write_that_was_interrupted_does_not_stand_in_the_way(folder: StateFolder) -> None:
    (folder.path / "key.new").write_text("half")
    assert len(key_from(minted(folder))) == 64


def test_settings_come_before_the_environment_and_only_the_path_is_passed_on(key_file: Path) -> None:
    env = {KEY_FILE_VARIABLE: "/elsewhere", KEY_VARIABLE: "x" * 16, "PATH": "/bin"}
    found = key_env(settings(key_file=key_file), env)
    assert found == {KEY_FILE_VARIABLE: str(key_file)}
    assert key_from({**env, **found}) == SECRET.encode()


def test_the_environment_is_asked_where_the_settings_name_no_key(key_file: Path) -> None:
    assert key_env(settings(), {KEY_FILE_VARIABLE: str(key_file), "PATH": "/bin"}) == {
        KEY_FILE_VARIABLE: str(key_file)
    }
    assert key_env(settings(), {KEY_VARIABLE: SECRET}) == {KEY_VARIABLE: SECRET}
    assert key_env(settings(), {KEY_VARIABLE: ""}) == {}


def test_a_key_that_cannot_be_used_is_a_sentence_without_the_key(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("tooshort")
    with pytest.raises(ContractError, match="at least 16 bytes") as refused:
        key_env(settings(key_file=short), {})
    assert "tooshort" not in str(refused.value)
    with pytest.raises(ContractError, match="cannot be read: No such file"):
        key_env(settings(key_file=tmp_path / "none"), {})


def test_a_key_file_that_cannot_be_read_is_named_by_what_the_user_wrote(tmp_path: Path) -> None:
    none, file = str(tmp_path / "none"), tmp_path / "settings.yaml"
    file.write_text(f"version: 1\nkey_file: {none}\n")
    given = [
        (settings(key_file=none), {}, "--key-file"),
        (load_settings(None, {}, {"ORCHESTRATOR_KEY_FILE": none}), {}, "ORCHESTRATOR_KEY_FILE"),
        (load_settings(file, {}, {}), {}, f"key_file in {file}"),
        (settings(), {KEY_FILE_VARIABLE: none}, KEY_FILE_VARIABLE),
    ]
    for loaded, env, named in given:
        with pytest.raises(ContractError) as refused:
            key_env(loaded, env)
        expected = f"The key file {none} ({named}) cannot be read: No such file or directory."
        assert str(refused.value) == expected


def test_variables_of_the_key_are_no_settings_and_reach_a_child(key_file: Path) -> None:
    env = {KEY_FILE_VARIABLE: str(key_file), KEY_VARIABLE: SECRET}
    loaded = load_settings(None, {}, env)
    assert SECRET not in str(list(loaded.rows()))
    assert child_env(loaded, env, {}) == env
