"""The container that fetches weights, on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, Unreachable
from orchestrator.shards.docker.container import Bind
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.weights import Wanted, fetch
from tests.integration.launcher.tiny_image import tiny_image

from .engine import docker, left_of, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

TOKEN = b"the-token-of-this-test"


@pytest.fixture(scope="module")
def image(engine_host: str) -> Iterator[str]:
    """Its program says what the model's name asks for; see `tiny_fetch.py`."""
    with tiny_image() as name:
        yield name


@pytest.fixture
async def engine(engine_host: str) -> AsyncIterator[Engine]:
    opened = await Engine.connect(engine_host)
    yield opened
    await opened.aclose()


async def may_act() -> None:
    """Nobody else leads."""


async def test_lines_come_as_they_are_said_and_the_last_one_is_the_answer(
    engine: Engine, image: str, unique: str
) -> None:
    said: list[str] = []
    before_the_end: list[str] = []

    def progress(line: str) -> None:
        said.append(line)
        if line == "one":
            before_the_end.extend(left_of(unique))

    told = await fetch(engine, unique, Wanted(image, "slow"), progress, within_s=60, may_act=may_act)
    assert said == ["one", "two", '{"path": "/data/slow", "revision": "r"}']
    assert told == {"path": "/data/slow", "revision": "r"}
    assert before_the_end == [f"tgio-{unique}-weights"]
    assert left_of(unique) == []


async def test_the_token_can_be_read_inside_and_is_shown_nowhere(
    engine: Engine, image: str, unique: str
) -> None:
    shown: list[str] = []

    def progress(line: str) -> None:
        shown.append(line + docker("inspect", f"tgio-{unique}-weights"))

    wanted = Wanted(image, "token", token=TOKEN)
    told = await fetch(engine, unique, wanted, progress, within_s=60, may_act=may_act)
    assert told == {"token_bytes": str(len(TOKEN))}
    assert TOKEN.decode() not in "".join(shown)


async def test_what_cannot_be_fetched_is_its_last_line(engine: Engine, image: str, unique: str) -> None:
    with pytest.raises(ConfigError, match=r"of bad were not fetched: The hub has no model bad\."):
        await fetch(engine, unique, Wanted(image, "bad"), lambda _: None, within_s=60, may_act=may_act)
    assert left_of(unique) == []


async def test_a_fetch_that_takes_too_long_or_is_cancelled_leaves_nothing(
    engine: Engine, image: str, unique: str
) -> None:
    endless = Wanted(image, "endless")
    with pytest.raises(Unreachable, match="did not come within 1 s"):
        await fetch(engine, unique, endless, lambda _: None, within_s=1, may_act=may_act)
    assert left_of(unique) == []
    task = asyncio.create_task(fetch(engine, unique, endless, lambda _: None, within_s=60, may_act=may_act))
    await asyncio.to_thread(until, lambda: left_of(unique), "the container")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert left_of(unique) == []


async def test_what_an_earlier_start_left_makes_way(engine: Engine, image: str, unique: str) -> None:
    labels = (f"--label=tgi-orchestrator.deployment={unique}", "--label=tgi-orchestrator.task=weights")
    docker("run", "--detach", *labels, "--name", f"tgio-{unique}-weights", image, "sleep", "60")
    told = await fetch(engine, unique, Wanted(image, "slow"), lambda _: None, within_s=60, may_act=may_act)
    assert told["revision"] == "r"


async def test_tgis_image_fetches_with_its_own_program_and_environment(
    engine: Engine, image: str, unique: str, tmp_path: Path
) -> None:
    """A stand-in for TGI's program, in a container that is laid out like TGI's."""
    program, package = tmp_path / "text-generation-server", tmp_path / "huggingface_hub.py"
    program.write_text('#!/bin/sh\necho "$@" token=${#HF_TOKEN} venv=$VIRTUAL_ENV\n')
    program.chmod(0o755)
    package.write_text("def snapshot_download(model, **more): return f'/data/{model}/snapshots/c0'\n")
    package.chmod(0o644)
    tgi = f"{image}-tgi"
    docker("create", "--name", unique, image, "true")
    docker("commit", "--change", "LABEL tgi-orchestrator.tgi=3.3.7", unique, tgi)
    docker("rm", unique)
    try:
        mounts = (
            Bind(str(program), "/usr/src/.venv/bin/text-generation-server"),
            Bind(str(package), "/app/huggingface_hub.py"),
        )
        wanted = Wanted(tgi, "org/m", "main", mounts=mounts, token=TOKEN)
        said: list[str] = []
        told = await fetch(engine, unique, wanted, said.append, within_s=60, may_act=may_act)
    finally:
        docker("image", "rm", "--force", tgi)
    assert said[0] == f"download-weights org/m --revision main token={len(TOKEN)} venv=/usr/src/.venv"
    assert told == {"path": "/data/org/m/snapshots/c0", "name": "org/m", "revision": "c0", "dtype_hint": ""}


async def test_our_own_image_finds_a_model_in_a_folder(
    engine: Engine, cpu_image: str, unique: str, mounted_model: Path
) -> None:
    wanted = Wanted(cpu_image, "/models/tiny", mounts=(Bind(str(mounted_model), "/models/tiny"),))
    told = await fetch(engine, unique, wanted, lambda _: None, within_s=100, may_act=may_act)
    assert (told["path"], told["name"]) == ("/models/tiny", "tiny")
    assert len(told["revision"]) == 16
    none = replace(wanted, model="/models/none")
    with pytest.raises(ConfigError, match="were not fetched: The model folder /models/none does not exist"):
        await fetch(engine, unique, none, lambda _: None, within_s=100, may_act=may_act)
