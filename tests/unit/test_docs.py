"""The documentation names what there is: every module, every setting, every metric, every command."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import Typer

from orchestrator.bootstrap import ROOT
from orchestrator.cli import app
from orchestrator.config import load_settings
from orchestrator.metrics import Metrics

DOCS = ROOT / "docs"


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_architecture_has_the_present_line_of_every_module() -> None:
    spec = importlib.util.spec_from_file_location("modules", DOCS / "modules.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = text_of("architecture.md")
    assert "| `errors.py` | Every error that the orchestrator raises on purpose |" in page
    assert generator.rewritten(page) == page, "run: python docs/modules.py"


def test_every_setting_is_documented() -> None:
    text = text_of("configuration.md")
    documented = set(re.findall(r"`([a-z_.*]+)`", text))
    for role in ("prefill", "decode", "mixed"):
        short = {f"shards.*.{name.lstrip('.')}" for name in (".gpus", ".tp", ".image", ".args", ".env")}
        documented |= {key.replace("*", role) for key in documented | short if key.startswith("shards.*")}
    assert set(load_settings(None, {}, {}).origins) - documented == set()


def test_every_metric_of_the_gateway_is_documented() -> None:
    metrics = Metrics(tuple)
    metrics.arrived()
    names = set(re.findall(r"^# TYPE (\w+)", metrics.render().decode(), re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    assert "orchestrator_requests_total" in names
    text = text_of("operations.md")
    assert {name for name in names if f"`{name}`" not in text} == set()


def commands(group: Typer, prefix: str = "tgi-orchestrator") -> Iterator[str]:
    for command in group.registered_commands:
        yield f"{prefix} {command.name or getattr(command.callback, '__name__', '')}"
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{prefix} {inner.name}" if inner.name else prefix)


def test_every_command_is_documented() -> None:
    text = text_of("operations.md")
    names = set(commands(app))
    assert {"tgi-orchestrator up", "tgi-orchestrator config show"} <= names
    assert {name for name in names if f"`{name}" not in text} == set()


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")]), ids=lambda p: p.name)
def test_every_local_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
