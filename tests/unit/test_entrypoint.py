"""How a TGI server is started with the overlay: hooks come in between, and nothing else changes.

TGI is a package of two modules here, written by the tests; what installs hooks is a stand-in too, so
that a subprocess need not load torch.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tgi_patches
from tgi_patches.contract import SPEC_VARIABLE
from tgi_patches.entrypoint.on_import import on_import

ROOT = Path(tgi_patches.__file__).parents[1]
COMMAND = ROOT / "tgi_patches" / "entrypoint" / "bin" / "text-generation-server"
LIMIT_S = 60

# --- after an import ---

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Makes a module that can be imported; it and every finder are gone with the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)

    def make(name: str, source: str) -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return name

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("overlay_"):
            del sys.modules[name]


def test_the_call_comes_after_the_module_and_before_its_importer_goes_on(write: Write) -> None:
    events: list[str] = []
    name = write("overlay_hooked", "value = 1\nlast = 2\n")
    importer = write("overlay_importer", "import overlay_hooked\nfound = overlay_hooked.value\n")

    def then() -> None:
        module = sys.modules[name]
        events.append(f"last is {module.last}")
        module.value = 5  # type: ignore[attr-defined]

    on_import(name, then)
    assert events == []
    assert importlib.import_module(importer).found == 5
    assert events == ["last is 2"]


def test_the_call_comes_once(write: Write) -> None:
    events: list[str] = []
    name = write("overlay_once", "")
    on_import(name, lambda: events.append("called"))
    for _ in range(2):
        importlib.import_module(name)
    importlib.reload(sys.modules[name])
    del sys.modules[name]
    importlib.import_module(name)
    assert events == ["called"]


def test_a_module_within_a_package_is_found(write: Write) -> None:
    events: list[str] = []
    write("overlay_package.__init__", "from overlay_package import inner\n")
    write("overlay_package.inner", "")
    on_import("overlay_package.inner", lambda: events.append("called"))
    importlib.import_module("overlay_package")
    assert events == ["called"]


def test_other_modules_are_not_touched(write: Write) -> None:
    events: list[str] = []
    write("overlay_other", "")
    write("overlay_named_more", "")
    on_import("overlay_named", lambda: events.append("called"))
    finders = [*sys.meta_path]
    for name in ("overlay_other", "overlay_named_more"):
        spec = importlib.import_module(name).__spec__
        assert spec is not None
        assert type(spec.loader).__module__ == "_frozen_importlib_external"
    assert (events, sys.meta_path) == ([], finders)


def test_the_module_is_what_it_would_have_been(write: Write, tmp_path: Path) -> None:
    source = '"""Says what it is."""\n\n\ndef function():\n    return 1\n'
    plain = importlib.import_module(write("overlay_plain", source))
    on_import(write("overlay_seen", source), lambda: None)
    seen = importlib.import_module("overlay_seen")
    assert seen.__doc__ == "Says what it is."
    assert seen.__file__ == str(tmp_path / "overlay_seen.py")
    assert set(vars(seen)) == set(vars(plain))


def test_a_module_that_fails_fails_as_it_would_have(write: Write) -> None:
    events: list[str] = []
    name = write("overlay_failing", "raise RuntimeError('no device')\n")
    on_import(name, lambda: events.append("called"))
    with pytest.raises(RuntimeError, match="no device"):
        importlib.import_module(name)
    assert name not in sys.modules
    assert events == []


def test_a_module_that_is_not_there_is_not_found(write: Write) -> None:
    events: list[str] = []
    on_import("overlay_absent", lambda: events.append("called"))
    with pytest.raises(ModuleNotFoundError, match="overlay_absent"):
        importlib.import_module("overlay_absent")
    assert events == []


# --- the command ---

CLI = """\
import json, sys
events = ["cli"]


def app():
    events.append("log set up")
    if "--load" in sys.argv:
        import text_generation_server.server
    loaded = sorted(name for name in sys.modules if name.startswith("tgi_patches."))
    print(json.dumps({"argv": sys.argv, "events": events, "loaded": loaded}))
    sys.exit(3)
"""
SERVER = """\
from text_generation_server.cli import events
events.append("server")
"""
START = f'''\
import runpy, sys, types


def install(env):
    from text_generation_server.cli import events
    events.append("install with " + env["{SPEC_VARIABLE}"])


hooks = types.ModuleType("tgi_patches.hooks.install")
hooks.install = install
sys.modules[hooks.__name__] = hooks
runpy.run_module("tgi_patches.entrypoint.text_generation_server", run_name="__main__", alter_sys=True)
'''
"""In place of `-m`: with a stand-in for what installs hooks."""


class Started:
    """Starts the wrapper over a TGI of our own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        package = directory / "text_generation_server"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "cli.py").write_text(CLI)
        (package / "server.py").write_text(SERVER)

    def env(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join((str(self.directory), str(ROOT)))
        return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}

    def __call__(self, *arguments: str, **more: str) -> dict[str, Any]:
        return self.run([sys.executable, "-c", START, *arguments], **more)

    def run(self, command: list[str], **more: str) -> dict[str, Any]:
        done = subprocess.run(command, env=self.env(**more), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 3, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def started(tmp_path: Path) -> Started:
    return Started(tmp_path)


def test_serve_with_a_spec_is_hooked_right_after_the_server_was_imported(started: Started) -> None:
    answer = started("serve", "a model", "--load", **{SPEC_VARIABLE: "a spec"})
    assert answer["argv"] == ["text-generation-server", "serve", "a model", "--load"]
    assert answer["events"] == ["cli", "log set up", "server", "install with a spec"]


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["serve", "m", "--load"], {}),
        (["download-weights", "m", "--load"], {SPEC_VARIABLE: "a spec"}),
        (["--load", "serve"], {SPEC_VARIABLE: "a spec"}),
        (["--load"], {SPEC_VARIABLE: "a spec"}),
    ],
    ids=["no spec", "another command", "serve is no command", "no command"],
)
def test_everything_else_is_stock(started: Started, arguments: list[str], env: dict[str, str]) -> None:
    answer = started(*arguments, **env)
    assert answer["argv"] == ["text-generation-server", *arguments]
    assert answer["events"] == ["cli", "log set up", "server"]


def test_the_command_is_found_by_name_and_passes_its_arguments_on(started: Started, tmp_path: Path) -> None:
    """As TGI's launcher looks it up: first on PATH, with `python` of TGI's environment behind it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = os.pathsep.join((str(COMMAND.parent), str(tmp_path / "bin"), os.defpath))
    arguments = ["download-weights", "a b", "", "$HOME *", "it's", '"', "--json-output"]
    answer = started.run(["text-generation-server", *arguments], PATH=path)
    assert answer["argv"] == ["text-generation-server", *arguments]
    assert answer["loaded"] == [
        "tgi_patches.contract",
        "tgi_patches.entrypoint",
        "tgi_patches.entrypoint.on_import",
    ]


def test_the_command_becomes_the_python_that_it_starts(tmp_path: Path) -> None:
    """A launcher that ends its child ends the server and not a shell around it."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$$"\nprintf "%s|" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    child = subprocess.Popen(
        [COMMAND, "serve", "a b"], env={"PATH": f"{tmp_path}:{os.defpath}"}, stdout=subprocess.PIPE, text=True
    )
    said, _ = child.communicate(timeout=LIMIT_S)
    assert said.splitlines() == [
        str(child.pid),
        "-P|-m|tgi_patches.entrypoint.text_generation_server|serve|a b|",
    ]
