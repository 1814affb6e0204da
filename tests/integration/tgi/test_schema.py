"""Where TGI's messages come from, and the sentence for an interpreter that has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.embedded.tgi.schema import read_schema
from orchestrator.errors import ConfigError
from tests.integration.tgi.protocol import schema


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


async def test_the_installed_package_describes_the_messages(fake_python: str) -> None:
    assert await read_schema(fake_python) == schema()


async def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"The interpreter /no/python of tgi\.python does not exist\."):
        await read_schema("/no/python")


async def test_an_interpreter_that_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run: Permission denied\."):
        await read_schema(str(tmp_path))


async def test_an_interpreter_without_tgi_tells_what_is_missing() -> None:
    with pytest.raises(
        ConfigError, match=r"has no TGI server: ModuleNotFoundError: .*text_generation_server"
    ):
        await read_schema(sys.executable, {"PYTHONPATH": ""})


async def test_what_prints_nothing_is_no_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"has no TGI server: it says nothing\."):
        await read_schema("/bin/true")


async def test_an_interpreter_that_hangs_is_given_up(tmp_path: Path) -> None:
    hanging = script(tmp_path, "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match=r"did not import TGI's messages within 0\.2 s"):
        await read_schema(hanging, deadline_s=0.2)
