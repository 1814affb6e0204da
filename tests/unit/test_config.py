"""Precedence, origins and the sentences a user gets for a mistake in the settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import Loaded, Settings, load_settings
from orchestrator.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "orchestrator.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def load(path: Path | None = None, env: dict[str, str] | None = None, **flags: Any) -> Loaded:
    return load_settings(path, {key.replace("__", "."): value for key, value in flags.items()}, env or {})


def sentence(path: Path | None = None, env: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, env, **flags)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_nothing_given_is_one_prefill_and_one_decode_shard_on_port_3000() -> None:
    loaded = load()
    settings = loaded.settings
    assert (settings.shards.prefill.count, settings.shards.decode.count, settings.shards.mixed.count) == (
        1,
        1,
        0,
    )
    assert (settings.gateway.host, settings.gateway.port) == ("127.0.0.1", 3000)
    assert settings.model.id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert settings.model.dtype == "auto"
    assert settings.redis.url is None
    assert set(loaded.origins.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(write: Write) -> None:
    path = write("version: 1\ngateway: {listen: '127.0.0.1:1'}\nmodel: {dtype: float32}\ndeployment: file\n")
    env = {"ORCHESTRATOR_GATEWAY__LISTEN": "127.0.0.1:2", "ORCHESTRATOR_MODEL__DTYPE": "bfloat16"}
    loaded = load(path, env, gateway__listen="127.0.0.1:3")
    assert loaded.settings.gateway.port == 3
    assert loaded.settings.model.dtype == "bfloat16"
    assert loaded.settings.deployment == "file"
    assert loaded.origins["gateway.listen"] == "flag"
    assert loaded.origins["model.dtype"] == "env ORCHESTRATOR_MODEL__DTYPE"
    assert loaded.origins["deployment"] == f"file {path}"
    assert loaded.origins["redis.url"] == "default"


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    assert load(gateway__listen=None).origins["gateway.listen"] == "default"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(env={"ORCHESTRATOR_REDIS__URL": ""}).origins["redis.url"] == "default"


def test_environment_values_reach_numbers_lists_and_mappings() -> None:
    settings = load(
        env={
            "ORCHESTRATOR_SHARDS__PREFILL__COUNT": "2",
            "ORCHESTRATOR_SHARDS__PREFILL__CPUS": "[[0], [1, 2]]",
            "ORCHESTRATOR_SHARDS__DECODE__ENV": "{}",
            "ORCHESTRATOR_ARENA__RECORD_TTL_S": "2.5",
        }
    ).settings
    assert settings.shards.prefill.count == 2
    assert settings.shards.prefill.cpus == [[0], [1, 2]]
    assert settings.shards.decode.env == {}
    assert settings.arena.record_ttl_s == 2.5


def test_other_variables_of_the_prefix_are_left_alone() -> None:
    load(env={"ORCHESTRATOR_SHARD_SPEC": "{}", "ORCHESTRATORX": "1", "PORT": "80", "MODEL_ID": "x"})


@pytest.mark.parametrize(
    ("text", "wrong", "nearest"),
    [
        ("gateway: {lisen: x}", "gateway.lisen", "gateway.listen"),
        ("shards: {prefil: {count: 1}}", "shards.prefil", "shards.prefill"),
        ("shards: {decode: {cuont: 1}}", "shards.decode.cuont", "shards.decode.count"),
        ("modell: {id: x}", "modell", "model"),
        ("listen: x", "listen", "gateway.listen"),
        ("arena: {record_ttl: 1}", "arena.record_ttl", "arena.record_ttl_s"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(
    write: Write, text: str, wrong: str, nearest: str
) -> None:
    path = write(text)
    assert sentence(path) == f"{path}: there is no key {wrong!r}; the nearest one is {nearest!r}."


def test_an_unknown_variable_is_named_with_the_nearest_key() -> None:
    text = sentence(env={"ORCHESTRATOR_GATEWAY__LISTN": "x"})
    assert text.startswith("ORCHESTRATOR_GATEWAY__LISTN: ")
    assert "'gateway.listen'" in text


def test_a_section_given_as_a_value_is_explained(write: Write) -> None:
    assert "gateway must be a section" in sentence(write("gateway: 3000"))
    assert "gateway is a section" in sentence(env={"ORCHESTRATOR_GATEWAY": "{}"})


def test_another_key_of_a_role_keeps_its_one_shard(write: Write) -> None:
    prefill = load(write("shards: {prefill: {cpus: [[0]]}}")).settings.shards.prefill
    assert (prefill.count, prefill.cpus) == (1, [[0]])


def test_an_empty_section_or_file_means_the_defaults(write: Write) -> None:
    assert load(write("gateway:\n")).settings == Settings()
    assert load(write("")).settings == Settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("shards: {prefill: {count: -1}}", "shards.prefill.count is -1"),
        ("shards: {prefill: {count: many}}", "shards.prefill.count is 'many'"),
        ("model: {dtype: float16}", "model.dtype is 'float16'"),
        ("gateway: {listen: localhost}", "must look like 127.0.0.1:3000"),
        ("gateway: {listen: '127.0.0.1:70000'}", "must look like 127.0.0.1:3000"),
        ("limits: {max_input_tokens: 4096}", "max_input_tokens (4096) must be below max_total_tokens (4096)"),
        ("shards: {prefill: {count: 0}, decode: {count: 0}}", "at least one shard is needed"),
        ("shards: {prefill: {cpus: [[0], [1]]}}", "cpus names 2 lists of cores for 1 shards"),
        (
            "shards: {prefill: {gpus: [[GPU-1]]}}",
            "shards.prefill.gpus needs containers: set launcher: docker",
        ),
        ("shards: {prefill: {gpus: [[GPU-1, GPU-2]]}}", "gpus names 2 GPUs for a shard of 1 ranks (tp)"),
        ("shards: {prefill: {gpus: [[GPU-1], [GPU-2]]}}", "gpus names 2 lists of GPUs for 1 shards"),
        ("shards: {decode: {mps_percent: 50}}", "mps_percent and gpu_memory_fraction need each other"),
        ("shards: {decode: {sidecar_port: 5}}", "shards.decode.sidecar_port is for shards at given urls"),
        ("{launcher: docker, tgi: {python: /bin/true}}", "tgi.python is for the launcher 'process'"),
        ("{launcher: docker, arena: {dir: /dev/shm/a}}", "arena.dir is for the launcher 'process'"),
        ("shards: {mixed: {env: {A: b}}}", "shards.mixed.env needs containers"),
        ("slo: {ttft_ms: 0}", "slo.ttft_ms is 0"),
        ("shards: {decode: {tp: 0}}", "shards.decode.tp is 0"),
        ("{launcher: docker, docker: {network: none}}", "must be a network of its own"),
        ("{launcher: docker, docker: {network: 'container:x'}}", "must be a network of its own"),
        ("{launcher: docker, docker: {log_bytes: 1}}", "docker.log_bytes is 1"),
        ("{launcher: docker, shards: {decode: {env: {A=B: c}}}}", "is no variable that a shard can be given"),
        (
            "{launcher: docker, shards: {decode: {env: {ORCHESTRATOR_X: c}}}}",
            "'ORCHESTRATOR_X' is no variable",
        ),
        ("launcher: podman", "launcher is 'podman'"),
        ("deployment: a/b", "deployment is 'a/b'"),
        ("version: 2", "version is 2"),
        ("redis: {url: 'http://x'}", "must begin with redis://"),
        ("gateway: {connect_timeout_s: 0}", "gateway.connect_timeout_s is 0"),
    ],
)
def test_a_value_that_cannot_be_is_one_sentence(write: Write, text: str, named: str) -> None:
    assert named in sentence(write(text))


def test_the_origin_of_a_wrong_value_is_named(write: Write) -> None:
    path = write("model: {dtype: float32}")
    text = sentence(path, {"ORCHESTRATOR_MODEL__DTYPE": "int4"})
    assert text.startswith("ORCHESTRATOR_MODEL__DTYPE: model.dtype is 'int4'")


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just words", "\tx: 1"])
def test_a_file_that_is_not_keys_and_values_is_one_sentence(write: Write, text: str) -> None:
    assert "orchestrator.yaml" in sentence(write(text))


def test_a_file_that_is_missing_or_not_text_is_one_sentence(tmp_path: Path) -> None:
    assert "cannot be read" in sentence(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in sentence(binary)


def test_a_password_is_never_shown() -> None:
    url = "redis://user:s3cret@10.0.0.1:6379/0"
    shown = {key: value for key, value, _ in load(redis__url=url).rows()}
    assert shown["redis.url"] == "redis://user:***@10.0.0.1:6379/0"
    assert "s3cret" not in sentence(redis__url="http://user:s3cret@host")


def test_rows_name_every_key_once_with_its_value_and_origin() -> None:
    rows = list(load(gateway__listen="[::1]:9").rows())
    keys = [key for key, _, _ in rows]
    assert len(keys) == len(set(keys))
    assert ("gateway.listen", "[::1]:9", "flag") in rows
    assert ("shards.mixed.count", 0, "default") in rows


def test_paths_are_absolute_and_know_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = load(model__cache="~/models", model__token_file="token").settings
    assert settings.model.cache == tmp_path / "models"
    assert settings.model.token_file == tmp_path / "token"


def test_ipv6_brackets_are_not_part_of_the_host() -> None:
    gateway = load(gateway__listen="[::1]:3001").settings.gateway
    assert (gateway.host, gateway.port) == ("::1", 3001)


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match="no key 'zzzqqq'; `config show` lists all"):
        load_settings(None, {"zzzqqq": 1}, {})


@given(st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12}){0,2}", fullmatch=True))
def test_a_suggestion_for_an_unknown_flag_exists(key: str) -> None:
    known = set(load().origins)
    if key in known:
        return
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {key: 1}, {})
    text = str(caught.value)
    if "nearest" in text:
        suggested = text.split("'")[3]
        assert any(leaf == suggested or leaf.startswith(f"{suggested}.") for leaf in known)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"shards.prefill.urls": ["10.0.0.1:3001"]}, "must look like http://10.0.0.1:3001"),
        ({"shards.prefill.urls": ["http://10.0.0.1"]}, "must look like http://10.0.0.1:3001"),
        ({"shards.prefill.urls": ["https://10.0.0.1:3001"]}, "must look like http://10.0.0.1:3001"),
        ({"shards.prefill.urls": ["http://a:3001/kv"]}, "must look like http://10.0.0.1:3001"),
        ({"shards.prefill.urls": ["http://a:99999"]}, "must look like http://10.0.0.1:3001"),
        (
            {"shards.decode.urls": ["http://a:1", "http://b:1"], "shards.decode.count": 3},
            "urls names 2 shards and count 3",
        ),
        ({"shards.decode.urls": ["http://a:1"], "shards.decode.cpus": [[0], [1]]}, "cpus names 2 lists"),
        ({"shards.prefill.urls": ["http://a:3001?kv"]}, "must look like http://10.0.0.1:3001"),
        (
            {"shards.decode.urls": ["http://a:1", "http://b:1", "http://A:1/"]},
            "http://A:1 is named twice in urls: each shard has an address of its own.",
        ),
        (
            {"shards.prefill.urls": ["http://a:1"], "shards.mixed.urls": ["http://a:1"]},
            "http://a:1 is named twice in urls: each shard has an address of its own.",
        ),
        ({"arena.pull_listen": "10.0.0.1"}, "must look like 127.0.0.1:3000"),
        ({"arena.pulled_bytes": -1}, "greater than or equal to 0"),
    ],
)
def test_what_is_wrong_with_other_hosts_is_told(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_settings(None, flags, {})


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@a:3001", "http://me@a:3001", "http://me:hunter2@a:3001/kv"]
)
def test_a_user_in_an_url_is_refused_and_no_password_is_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, {"shards.prefill.urls": ["http://b:1", url]}, {})
    assert str(refused.value).startswith("flag: shards.prefill.urls: must look like http://10.0.0.1:3001")
    assert "hunter2" not in str(refused.value)


def test_urls_alone_say_how_many_shards_there_are() -> None:
    one = load_settings(None, {"shards.prefill.urls": ["http://a:1/"]}, {}).settings.shards.prefill
    assert (one.urls, one.shards) == (["http://a:1"], 1)
    variable = {"ORCHESTRATOR_SHARDS__DECODE__URLS": '["http://a:1", "http://b:1"]'}
    assert load_settings(None, {}, variable).settings.shards.decode.shards == 2
