"""Real TGI servers for tests; without an interpreter that has one they are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config import load_settings
from orchestrator.embedded import package
from tests.tgi import last_run
from tests.tgi.servers import Servers, absolute_python

LIMIT_S = 1800
"""Per test, with the servers that it starts and, once, the model's conversion."""
ASK_LIMIT_S = 60
DESELECTED = pytest.StashKey[int]()
ABSENT = "TGI_PYTHON names no interpreter with TGI's server: see docs/tgi.md"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; pytest hands over all that it collected."""
    for item in items:
        if _is_ours(item):
            item.add_marker(pytest.mark.tgi)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[DESELECTED] = item.config.stash.get(DESELECTED, 0) + _is_ours(item)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down a complete run in which nothing failed."""
    ours = [item for item in session.items if _is_ours(item)]
    left_out = session.config.stash.get(DESELECTED, 0)
    python = absolute_python(os.environ.get("TGI_PYTHON", ""))
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus or python is None or reporter is None:
        return
    if last_run.complete((item.path.name for item in ours), left_out):
        names = {item.nodeid for item in ours}
        passed, skipped = (
            sum(report.nodeid in names for report in reporter.stats.get(outcome, ()))
            for outcome in ("passed", "skipped")
        )
        if passed + skipped == len(ours) and passed:
            last_run.write(python, {"passed": passed, "skipped": skipped})


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


@pytest.fixture(scope="session")
def tgi_python() -> Path:
    """The interpreter that TGI_PYTHON names, once it has shown that it has the server."""
    python = absolute_python(os.environ.get("TGI_PYTHON", ""))
    if python is None or not _has_server(python):
        pytest.skip(ABSENT)
    return python


def _has_server(python: Path) -> bool:
    command = [str(python), "-c", "import text_generation_server.pb.generate_pb2"]
    return subprocess.run(command, capture_output=True, timeout=ASK_LIMIT_S).returncode == 0


@pytest.fixture(scope="session")
def model(tgi_python: Path) -> Path:
    """SmolLM2-135M-Instruct as `up` keeps it; converted once per machine."""
    cache = load_settings(None, {}, os.environ).settings.model.cache
    return package.convert(cache, lambda said: None)


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model of all tests, its tokenizer described as TGI's transformers (version 4) expects it."""
    folder = tmp_path_factory.mktemp("tgi-model") / "tiny-llama"
    shutil.copytree(tiny_model, folder)
    config = folder / "tokenizer_config.json"
    raw = json.loads(config.read_text())
    raw["additional_special_tokens"] = raw.pop("extra_special_tokens", [])
    config.write_text(json.dumps(raw | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def servers(tgi_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts TGI servers: `shared(plan)` for the session, `own(plan)` for a block."""
    started = Servers(tgi_python, tmp_path_factory.mktemp("tgi"))
    yield started
    started.close()
