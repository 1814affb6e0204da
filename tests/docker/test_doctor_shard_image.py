"""Doctor with the image of TGI and the overlay: its ends run by TGI's own interpreter."""

from __future__ import annotations

import json

import pytest

from orchestrator.deployment.doctor.lab import DOCTOR_LABEL

from .cli import DockerLine
from .test_shard_image import docker
from .test_shard_image import image as shard_image  # noqa: F401 - a fixture

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def test_arena_and_pull_are_proved_between_containers_of_the_shard_image(
    docker_cli: DockerLine,
    shard_image: str,  # noqa: F811
) -> None:
    done = docker_cli.run("doctor", "--quick", "--json", "--image", shard_image, limit_s=200)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found[f"image {shard_image}"]["told"].endswith("TGI 3.3.7 with the overlay.")
    assert found["transport arena"]["state"] in ("ok", "warning")  # a warning: slower than it should be
    assert found["transport pull"]["state"] == "ok"
    assert docker("ps", "--all", "--quiet", "--filter", f"label={DOCTOR_LABEL}") == ""
