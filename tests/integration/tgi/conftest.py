"""A fake TGI server on a unix socket of the test, and a connection to it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from orchestrator.embedded.tgi.client import Connection
from tests.integration.tgi import fake_server
from tests.integration.tgi.fake_server import FakeTgi
from tests.integration.tgi.protocol import schema


@pytest.fixture
def uds() -> Iterator[Path]:
    """In a folder whose name is short enough for a socket's address."""
    with TemporaryDirectory(prefix="tgi-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """Looks like an interpreter that has TGI's server."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_server.__file__} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
async def tgi(uds: Path) -> AsyncIterator[FakeTgi]:
    fake = FakeTgi()
    server = await fake.serve(str(uds))
    yield fake
    await server.stop(0)


@pytest.fixture
async def connection(tgi: FakeTgi, uds: Path) -> AsyncIterator[Connection]:
    opened = await Connection.open(uds, schema(), deadline_s=10)
    yield opened
    await opened.close()
