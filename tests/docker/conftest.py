"""What tests on a real Docker engine share.  The variables that name it stand in `.ci/docker`."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.shards.docker.engine import DEFAULT_HOST

from .cli import DockerLine
from .engine import answers, has_image, remove_all


@pytest.fixture(scope="session")
def engine_host() -> str:
    """Of an engine that answers."""
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if not answers(host):
        pytest.skip(f"No Docker engine answers at {host}: start one, or name it in DOCKER_HOST.")
    return host


@pytest.fixture(scope="session")
def cpu_image(engine_host: str) -> str:
    """With the embedded shard."""
    return _image("TGI_ORCHESTRATOR_TEST_CPU_IMAGE")


@pytest.fixture(scope="session")
def orchestrator_image(engine_host: str) -> str:
    """With gateway, conductor and command line."""
    return _image("TGI_ORCHESTRATOR_TEST_IMAGE")


def _image(variable: str) -> str:
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"{variable} names no image: build one with `make images`.")
    assert has_image(name), f"{variable} names {name}, which the engine does not have."
    return name


@pytest.fixture
def unique(engine_host: str) -> Iterator[str]:
    """A deployment's name; what carries its label is gone after the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    remove_all(name)


@pytest.fixture(scope="session")
def mounted_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model where a container's user may read it: what saved it closed it to others."""
    folder = tmp_path_factory.mktemp("mounted") / tiny_model.name
    shutil.copytree(tiny_model, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    return folder


@pytest.fixture
def docker_cli(
    engine_host: str,
    cpu_image: str,
    unique: str,
    mounted_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DockerLine]:
    """`tgi-orchestrator` that launches containers; its processes end before `unique` removes those."""
    line = DockerLine(
        model=mounted_model,
        state_home=Path(tmp_path_factory.mktemp("s", numbered=True)),
        name=unique,
        host=engine_host,
        image=cpu_image,
    )
    yield line
    line.end()
