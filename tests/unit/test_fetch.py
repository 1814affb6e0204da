"""`python -m orchestrator.embedded.fetch`, without a hub."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from orchestrator.embedded.fetch import Growth, main, newest, size_of


def test_a_folder_is_found_and_told_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(8))
    said: list[str] = []
    assert main([str(folder), "--cache", str(tmp_path)], said.append) == 0
    told = json.loads(said[-1])
    assert (told["path"], told["name"], told["dtype_hint"]) == (str(folder), "tiny", "float32")


@pytest.mark.parametrize(("model", "sentence"), [("/no/such", "does not exist"), ("a b", "neither a folder")])
def test_what_cannot_be_found_is_the_last_line_and_exit_code_2(
    model: str, sentence: str, tmp_path: Path
) -> None:
    said: list[str] = []
    assert main([model, "--cache", str(tmp_path)], said.append) == 2
    assert sentence in said[-1]


def test_growth_is_told_from_where_it_began_and_never_beyond_the_whole(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(bytes(100))
    lines: list[str] = []
    enough = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if '"new"' in line:
            enough.set()

    growth = Growth(say, every_s=0.01)
    growth.begin(tmp_path, 30)
    (tmp_path / "new").write_bytes(bytes(50))
    os.utime(tmp_path / "old", (0, 0))
    assert enough.wait(20)
    growth.end()
    assert json.loads(lines[-1]) == {"done_bytes": 30, "total_bytes": 30, "file": "new"}


def test_links_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(10))
    (tmp_path / "snapshot").symlink_to(tmp_path / "blob")
    assert (size_of(tmp_path), newest(tmp_path)) == (10, "blob")
    assert (size_of(tmp_path / "none"), newest(tmp_path / "none")) == (0, "")
