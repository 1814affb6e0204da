"""A server that is not hooked, for whatever reason, is a stock server that says why."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tgi_patches.contract import EPOCH_VARIABLE, STRICT_VARIABLE, Role, ShardSpec
from tgi_patches.hooks import guard
from tgi_patches.hooks.install import install
from tgi_patches.report import Report, read_report, report_path


class Service:
    """What stands at TextGenerationService's place in a TGI of another version."""

    def __init__(self, model: Any) -> None:
        self.model = model


class Server:
    """A package `text_generation_server` of our own, and the environment of a shard."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.service = type("TextGenerationService", (Service,), {"__init__": Service.__init__})
        spec = ShardSpec("dep", "d0", Role.DECODE, "m", "m", arena_dir=str(directory))
        self.env = {**spec.to_env(), EPOCH_VARIABLE: "5", "RANK": "1", "WORLD_SIZE": "2"}

    def modules(self) -> dict[str, ModuleType]:
        package = "text_generation_server"
        made = {name: ModuleType(name) for name in (package, f"{package}.models", f"{package}.server")}
        made[f"{package}.server"].TextGenerationService = self.service  # type: ignore[attr-defined]
        return made

    @property
    def report(self) -> Report | None:
        return read_report(report_path(self.directory, "dep", "d0", 1))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server(tmp_path / "arenas")
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_an_unknown_tgi_stays_as_it_is_and_the_report_says_why(server: Server) -> None:
    before = dict(vars(server.service))
    install(server.env)
    assert dict(vars(server.service)) == before
    report = server.report
    assert report is not None
    assert (report.hooked, report.armed, report.epoch, report.rank, report.world_size) == (
        False,
        False,
        5,
        1,
        2,
    )
    assert report.note.startswith("This TGI is not one that the overlay was tested with: ")
    assert "TextGenerationService.__init__" in report.note


def test_strict_refuses_to_start_an_unknown_tgi(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        install(server.env | {STRICT_VARIABLE: "1"})
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert "This TGI is not one" in said[-1]
    assert said[-1].endswith(f"({STRICT_VARIABLE}=1)")


BROKEN = [
    {},
    {"ORCHESTRATOR_SHARD_SPEC": "{"},
    {"ORCHESTRATOR_SHARD_SPEC": "[]"},
    {EPOCH_VARIABLE: "soon"},
    {"RANK": "first"},
]


@pytest.mark.parametrize("change", BROKEN)
def test_a_spec_that_cannot_be_read_leaves_a_stock_server(change: dict[str, str], server: Server) -> None:
    env = server.env | change if change else {}
    install(env)
    assert server.report is None
    with pytest.raises(SystemExit):
        install(env | {STRICT_VARIABLE: "1"})


def test_a_spec_without_a_folder_for_arenas_leaves_a_stock_server(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(vars(server.service))
    env = server.env | ShardSpec("dep", "d0", Role.DECODE, "m", "m").to_env()
    install(env)
    assert dict(vars(server.service)) == before
    with pytest.raises(SystemExit):
        install(env | {STRICT_VARIABLE: "1"})
    assert "names no folder for arenas" in capsys.readouterr().err


def made(server: Server, monkeypatch: pytest.MonkeyPatch, model: Any) -> Any:
    """The service with that model, hooked by an overlay that knows this server."""
    settings = ModuleType("text_generation_server.models.globals")
    settings.ATTENTION = "flashinfer"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    for table in ("SERVER", "FLASH", "CAUSAL"):
        monkeypatch.setattr(guard, table, {})
    for name in ("Warmup", "Prefill", "Decode"):
        setattr(server.service, name, answer)
    install(server.env)
    return server.service(model)


async def answer(service: Any, *args: Any) -> str:
    return "stock"


def model_of(name: str, ranks: int = 1) -> Any:
    kind = type(name, (), {})
    found = kind()
    found.world_size = ranks
    found.batch_type = type(f"{name}Batch", (), {})
    found.device = SimpleNamespace(type="cuda")
    return found


async def test_a_model_that_cannot_be_relayed_is_served_and_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = made(server, monkeypatch, model_of("VlmCausalLM"))
    report = server.report
    assert report is not None
    assert (report.hooked, report.model_class) == (False, "VlmCausalLM")
    assert "VlmCausalLM cannot be relayed" in report.note
    assert await service.Warmup(None, None) == "stock"
    assert await service.Prefill(None, None) == "stock"


def test_a_model_that_several_ranks_do_not_split_is_served_and_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(server, monkeypatch, model_of("CausalLM", ranks=2))
    report = server.report
    assert report is not None
    assert not report.hooked
    assert "on 2 ranks cannot be relayed" in report.note


async def test_a_model_of_unknown_source_is_served_and_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is known, the classes of its model are not."""
    made(server, monkeypatch, model_of("VlmCausalLM"))
    monkeypatch.setattr(guard, "FLASH", {"text_generation_server.models:FlashCausalLM.filter": ("0" * 16,)})
    service = server.service(model_of("FlashCausalLM"))
    report = server.report
    assert report is not None
    assert (report.hooked, report.model_class) == (False, "FlashCausalLM")
    assert "FlashCausalLM.filter differ" in report.note
    assert await service.Warmup(None, None) == "stock"


def test_a_model_that_the_overlay_cannot_look_at_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = object()
    assert made(server, monkeypatch, model).model is model
