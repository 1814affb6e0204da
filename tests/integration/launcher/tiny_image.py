"""An image with `tiny_shard.py` as its embedded shard, on an engine that the environment names."""

from __future__ import annotations

import io
import os
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException

ROOT = Path(__file__).parents[3]
BASE_VARIABLE = "TGI_ORCHESTRATOR_TEST_BASE_IMAGE"
"""Names an image with Python 3.11."""
DOCKERFILE = """FROM {base}
LABEL tgi-orchestrator.engine=embedded
COPY app /app
ENV PYTHONPATH=/app
USER 10001:10001
"""


@contextmanager
def tiny_image() -> Iterator[str]:
    """Its name; skips where nothing can be built.  Removed at the end."""
    base = os.environ.get(BASE_VARIABLE, "")
    if not base or not os.environ.get("DOCKER_HOST"):
        pytest.skip(f"{BASE_VARIABLE} and DOCKER_HOST name no image to build on and no engine.")
    try:
        client = docker.DockerClient.from_env(version="auto")
    except DockerException:
        pytest.skip("No Docker engine answers.")
    name = f"tgi-orchestrator-tiny:{uuid.uuid4().hex[:8]}"
    try:
        client.images.build(fileobj=_context(base), custom_context=True, tag=name, rm=True)
        yield name
    finally:
        client.images.remove(name, force=True)
        client.close()


def _context(base: str) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        _add(tar, "Dockerfile", DOCKERFILE.format(base=base).encode())
        for package in (
            "tgi_patches",
            "orchestrator",
            "orchestrator/embedded",
            "orchestrator/embedded/shard",
        ):
            _add(tar, f"app/{package}/__init__.py", b"")
        contract = (ROOT / "tgi_patches" / "contract.py").read_bytes()
        _add(tar, "app/tgi_patches/contract.py", contract)
        shard = Path(__file__).with_name("tiny_shard.py").read_bytes()
        _add(tar, "app/orchestrator/embedded/shard/__main__.py", shard)
        fetch = Path(__file__).with_name("tiny_fetch.py").read_bytes()
        _add(tar, "app/orchestrator/embedded/fetch.py", fetch)
    packed.seek(0)
    return packed


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
