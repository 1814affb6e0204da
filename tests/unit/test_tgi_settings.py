"""TGI's server as the engine: what may be set, what is launched, what a user sees of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.banner import banner, facts
from orchestrator.config import Loaded, load_settings
from orchestrator.core.shard import Answered, Launched, Watched, observe
from orchestrator.core.snapshot import Reserved, ShardStatus
from orchestrator.core.ticket import ShardView
from orchestrator.deployment.arena import remove_arenas
from orchestrator.deployment.plan import make_plan
from orchestrator.deployment.state import State
from orchestrator.embedded.weights import ResolvedModel
from orchestrator.errors import ConfigError
from orchestrator.queues import wire
from orchestrator.shards.fake import FakeShard
from tgi_patches.contract import PROTOCOL_VERSION, Limits, Role, ShardSpec, StatusReply

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 8192,
}
NOTE = "This TGI is not one that the overlay was tested with."


def specs_of(flags: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[ShardSpec, ...]:
    model = ResolvedModel(Path("/m"), "tiny", "r1", "float32")
    return make_plan(load_settings(None, flags, env or {}), model, CONFIG, "float32", (0, 1)).specs


# --- settings and plan ---


def test_without_an_interpreter_the_engine_is_our_own() -> None:
    assert [(spec.tgi_python, dict(spec.tgi_env)) for spec in specs_of({})] == [("", {}), ("", {})]


def test_every_shard_is_told_the_interpreter_and_its_variables() -> None:
    told = {"ORCHESTRATOR_TGI__ENV": '{"ATTENTION": "paged"}'}
    specs = specs_of({"tgi.python": "/tgi/bin/python"}, told)
    assert [(spec.tgi_python, spec.tgi_env) for spec in specs] == [
        ("/tgi/bin/python", {"ATTENTION": "paged"}),
        ("/tgi/bin/python", {"ATTENTION": "paged"}),
    ]
    assert ShardSpec.from_env(specs[0].to_env()) == specs[0]


def test_the_interpreter_is_not_resolved_because_its_link_is_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to("/usr/bin/env")
    monkeypatch.chdir(tmp_path)
    assert specs_of({"tgi.python": "./python"})[0].tgi_python == str(tmp_path / "python")


def test_the_flag_of_up_is_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Loaded] = []
    monkeypatch.setattr("orchestrator.commands.up.start", lambda loaded, **_: started.append(loaded))
    assert CliRunner().invoke(app, ["up", "--tgi-python", "/tgi/bin/python"]).exit_code == 0
    assert started[0].settings.tgi.python == Path("/tgi/bin/python")
    assert started[0].origins["tgi.python"] == "flag"


def test_int8_is_refused_with_tgi() -> None:
    with pytest.raises(ConfigError, match=r"int8 is the embedded engine's; TGI's server does not have it"):
        specs_of({"tgi.python": "/p", "model.dtype": "int8"})


def test_variables_without_an_interpreter_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"name its interpreter in tgi\.python"):
        specs_of({}, {"ORCHESTRATOR_TGI__ENV": '{"ATTENTION": "paged"}'})


def test_the_overlay_s_own_variables_are_no_settings() -> None:
    env = {"ORCHESTRATOR_TGI_STRICT": "1", "ORCHESTRATOR_SHARD_EPOCH": "7"}
    assert load_settings(None, {}, env).settings == load_settings(None, {}, {}).settings


# --- what is shown ---


def state_of(tgi_python: str) -> State:
    spec = ShardSpec("d", "mixed-0", Role.MIXED, "/m", "tiny", tgi_python=tgi_python)
    return State("d", 1, 1, "http://x", "unix:///r", "tiny", "float32", "/arenas", (spec,))


def test_the_banner_names_the_engine_where_it_is_tgi_s() -> None:
    assert "serves tiny in float32 on TGI's own server (mixed-0)." in banner(state_of("/p"), detached=False)
    assert "serves tiny in float32 (mixed-0)." in banner(state_of(""), detached=False)
    assert [facts(state_of(python))["engine"] for python in ("/p", "")] == ["TGI", "embedded"]


@pytest.fixture
def unhooked() -> ShardView:
    view = FakeShard("mixed-0", Role.MIXED).view()
    fingerprint = replace(view.fingerprint, attention="flashdecoding-ipex")
    return replace(view, fingerprint=fingerprint, hooked=False, note=NOTE)


def test_a_shard_s_engine_is_told_by_its_attention(unhooked: ShardView) -> None:
    assert unhooked.engine == "TGI"
    assert FakeShard("mixed-0", Role.MIXED).view().engine == "embedded"


def test_the_note_travels_from_the_shard_to_every_gateway(unhooked: ShardView) -> None:
    status = StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment="d",
        shard="mixed-0",
        role=Role.MIXED,
        epoch=7,
        fingerprint=unhooked.fingerprint,
        limits=Limits(10, 20),
        kv_tokens=1,
        slots=1,
        ring_bytes=0,
        record_limit_bytes=0,
        bytes_per_token=1,
        hooked=False,
        note=NOTE,
    )
    launched = observe(Watched("mixed-0", Role.MIXED), Launched("http://x"), 0.0)
    seen = observe(launched, Answered(StatusReply.from_dict(json.loads(json.dumps(status.to_dict())))), 1.0)
    view = seen.view()
    assert view is not None
    arrived = wire.view(wire.encode(view), "ready")
    assert (arrived.hooked, arrived.note, arrived.engine) == (False, NOTE, "TGI")
    assert ShardStatus.of(seen, Reserved(), pid=1, problem="").note == NOTE


# --- what is left behind ---


def test_files_beside_the_arenas_go_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "arenas" / "blue"
    folder.mkdir(parents=True)
    for name in ("decode-0.0.report", "decode-0.0.report-new", "decode-0.0.mailbox"):
        (folder / name).touch()
    remove_arenas(tmp_path / "arenas", "blue")
    assert not (tmp_path / "arenas").exists()


def test_an_interpreter_may_be_a_command_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "tgi-python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for named in ("tgi-python", str(python)):
        assert {spec.tgi_python for spec in specs_of({"tgi.python": named})} == {str(python)}
