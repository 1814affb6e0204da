"""What is in the two images of compose/Dockerfile, and what is not."""

from __future__ import annotations

import json

import pytest

from orchestrator.shards.docker.names import ENGINE_LABEL

from .engine import docker, inspected

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

TIGHT = (
    "--rm",
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--network=none",
)


@pytest.fixture(params=["orchestrator_image", "cpu_image"])
def image(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def inside(image: str, *command: str) -> str:
    return docker("run", *TIGHT, "--entrypoint", command[0], image, *command[1:])


def test_the_command_line_runs_with_and_without_its_name(image: str) -> None:
    assert docker("run", *TIGHT, image, "tgi-orchestrator", "version") == docker(
        "run", *TIGHT, image, "version"
    )
    assert "Start Redis, shards, conductor and gateway" in docker("run", *TIGHT, image)


def test_it_is_nobody_of_the_host_and_what_it_writes_is_its_own(image: str) -> None:
    config = inspected(image)["Config"]
    assert config["User"] == "10001:10001"
    assert not config.get("Volumes")
    owned = "stat -c '%u:%g %a %n' /var/lib/tgi-orchestrator /run/tgi-orchestrator /data /arenas; id -u"
    assert inside(image, "sh", "-c", owned).splitlines() == [
        "10001:10001 700 /var/lib/tgi-orchestrator",
        "10001:10001 700 /run/tgi-orchestrator",
        "10001:10001 755 /data",
        "10001:10001 2770 /arenas",
        "10001",
    ]


def test_nothing_of_the_build_is_left(image: str) -> None:
    told = json.dumps(inspected(image)["Config"]) + docker("history", "--no-trunc", image)
    assert "PIP_" not in told
    junk = r"find /opt /root /home /var /build \( -name '*.whl' -o -name '*.a' -o -name .cache \) 2>/dev/null"
    assert inside(image, "sh", "-c", f"{junk}; true") == ""
    assert inside(image, "sh", "-c", "test ! -e /build && echo gone") == "gone\n"


def test_only_one_of_them_has_the_shard(orchestrator_image: str, cpu_image: str) -> None:
    labels = [
        inspected(image)["Config"]["Labels"].get(ENGINE_LABEL) for image in (orchestrator_image, cpu_image)
    ]
    assert labels == [None, "embedded"]
    names = "('torch', 'transformers', 'redis')"
    found = f"import importlib.util as u; print([bool(u.find_spec(n)) for n in {names}])"
    assert inside(orchestrator_image, "python", "-c", found) == "[False, False, True]\n"
    assert inside(cpu_image, "python", "-c", found) == "[True, True, True]\n"


def test_torch_computes_though_it_was_made_smaller(cpu_image: str) -> None:
    lines = (
        "import torch, torch.multiprocessing, transformers.models.qwen2.modeling_qwen2",
        "print((torch.ones(3, 3) @ torch.full((3, 1), 2.0)).sum().item(), torch.distributed.is_available())",
    )
    assert inside(cpu_image, "python", "-c", "; ".join(lines)).splitlines()[-1] == "18.0 True"


def test_what_a_shard_imports_is_compiled_already(cpu_image: str) -> None:
    verbose = "python -I -v -c 'import orchestrator.embedded.shard.assemble' 2>&1"
    read = "sed -n \"s/^# code object from '\\(.*site-packages.*\\)'$/\\1/p\""
    files = inside(cpu_image, "sh", "-c", f"{verbose} | {read}").splitlines()
    assert any("/torch/" in file for file in files)
    assert [file for file in files if not file.endswith(".pyc")] == []


def test_the_health_check_tells_that_nothing_has_started(image: str) -> None:
    check = inspected(image)["Config"]["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    said = inside(image, "sh", "-c", f"{' '.join(check[1:])} 2>&1; echo $?")
    assert said == "Nothing has started here yet.\n1\n"
