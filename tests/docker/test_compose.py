"""The compose files: all are understood, the one without GPUs and the one with the socket really run."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .composition import COMPOSE, Composition, curl
from .engine import containers_of, docker, inspected, left_of, remove_all, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

FILES = ("compose.yaml", "compose.gpu.yaml", "compose.gpu-fixed.yaml")
NEEDED = {"MODEL": "org/model", "DOCKER_GID": "4321", "PREFILL_GPU": "GPU-1", "DECODE_GPU": "GPU-2"}
PROMPT = "one two three four"
NEW_TOKENS = 12


@pytest.fixture
def described(tmp_path: Path) -> Callable[..., Any]:
    """A file as compose understands it, with other variables than NEEDED."""

    def config(file: str, **more: str) -> Any:
        return Composition("checked", NEEDED | more, tmp_path, COMPOSE / file).config()

    return config


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_privileged_and_only_the_gateway_is_published_here(
    described: Callable[..., Any], file: str
) -> None:
    services = described(file, PORT="3456")["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "cap_add", "devices"}, name
        assert service["restart"] == ("no" if name == "key" else "unless-stopped"), name
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert list(published) == ["orchestrator"]
    assert re.findall(r"127\.0\.0\.1|3456|3000", str(published))[:3] == ["127.0.0.1", "3456", "3000"]


@pytest.mark.parametrize("file", FILES)
def test_the_engines_socket_is_mounted_where_shards_are_launched_and_nowhere_else(
    described: Callable[..., Any], file: str
) -> None:
    services = described(file)["services"]
    with_socket = [name for name, service in services.items() if "docker.sock" in str(service.get("volumes"))]
    assert with_socket == (["orchestrator"] if file == "compose.gpu.yaml" else [])


def test_fixed_shards_get_the_gpus_that_were_named(described: Callable[..., Any]) -> None:
    services = described("compose.gpu-fixed.yaml")["services"]
    given = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert given == {"prefill-0": ["GPU-1"], "decode-0": ["GPU-2"]}
    orders = [json.loads(services[name]["environment"]["ORCHESTRATOR_SHARD_SPEC"]) for name in sorted(given)]
    assert [(one["shard"], one["role"], one["model"]) for one in orders] == [
        ("decode-0", "decode", "org/model"),
        ("prefill-0", "prefill", "org/model"),
    ]


def test_what_must_be_named_is_asked_for_in_a_sentence(tmp_path: Path) -> None:
    for file, variable, sentence in (
        ("compose.gpu.yaml", "DOCKER_GID", "the group of the socket"),
        ("compose.gpu-fixed.yaml", "DECODE_GPU", "a GPU by UUID"),
        ("compose.gpu-fixed.yaml", "MODEL", "name a model in .env"),
    ):
        given = {name: value for name, value in NEEDED.items() if name != variable}
        done = Composition("checked", given, tmp_path, COMPOSE / file).tried("config", "--quiet")
        assert done.returncode != 0
        assert sentence in done.stderr


# --- really started -------------------------------------------------------------------------------


@pytest.fixture
def variables(cpu_image: str, orchestrator_image: str) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    return {
        "IMAGE": orchestrator_image,
        "CPU_IMAGE": cpu_image,
        # It has a redis-server, and no registry is needed.
        "REDIS_IMAGE": orchestrator_image,
        "MODEL": "/model",
        "DTYPE": "float32",
        "PORT": str(port),
        "ARENA_SIZE": "128m",
        "PREFILL_CPUS": str(cores[0]),
        "DECODE_CPUS": str(cores[-1]),
    }


def started(composition: Composition) -> Iterator[Composition]:
    """Until the test has ended; then nothing of it is left."""
    try:
        composition("up", "--detach", "--no-build")
        yield composition
    except BaseException:
        print(composition.tried("logs", "--no-color", "--tail=50").stdout)  # noqa: T201 - shown by pytest
        raise
    finally:
        composition("down", "--volumes", "--timeout", "20")
    assert composition.left() == []


@pytest.fixture
def separated(variables: dict[str, str], mounted_model: Path, tmp_path: Path) -> Iterator[Composition]:
    """compose.yaml with the tiny model, every request split."""
    with_model = {"volumes": [f"{mounted_model}:/model:ro"]}
    choice = {"environment": {"ORCHESTRATOR_ROUTING__CHOICE": "separated"}}
    services = {"prefill-0": with_model, "decode-0": with_model, "orchestrator": with_model | choice}
    yield from started(
        Composition(f"tgio-{uuid.uuid4().hex[:8]}", variables, tmp_path, override={"services": services})
    )


@pytest.fixture(scope="module")
def reference(mounted_model: Path) -> str:
    """What transformers itself says to PROMPT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(mounted_model)
    model = AutoModelForCausalLM.from_pretrained(mounted_model, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    answer = whole[0, ids.shape[1] :]
    assert len(answer) == NEW_TOKENS  # not at its end with the first token
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def asked(composition: Composition) -> tuple[int, dict[str, str], Any]:
    """Status, headers and answer to PROMPT, without sampling."""
    url = f"http://127.0.0.1:{composition.variables['PORT']}/generate"
    parameters = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return curl(url, {"inputs": PROMPT, "parameters": parameters})


def answered(composition: Composition) -> tuple[str, dict[str, str]]:
    """(text, headers)"""
    status, headers, said = asked(composition)
    assert status == 200, said
    return said["generated_text"], headers


def serves(composition: Composition) -> bool:
    container = composition.container("orchestrator")
    return bool(inspected(container)["State"]["Health"]["Status"] == "healthy")


def test_a_pair_answers_curl_and_so_it_does_after_a_restart(separated: Composition, reference: str) -> None:
    until(lambda: serves(separated), "the gateway")
    text, headers = answered(separated)
    assert text == reference
    assert headers["x-orchestrator-route"] == "separated"
    # Not computed a second time: the record came over the tmpfs that both shards mount.
    assert headers["x-orchestrator-import"] == "hit"

    shards = [separated.container(name) for name in ("prefill-0", "decode-0")]
    before = [inspected(shard)["State"]["StartedAt"] for shard in shards]
    separated("restart", "orchestrator")
    until(lambda: serves(separated), "the gateway after its restart")
    assert answered(separated)[0] == reference
    assert [inspected(shard)["State"]["StartedAt"] for shard in shards] == before

    key = docker("exec", shards[0], "cat", "/run/tgi-orchestrator/key").strip()
    assert re.fullmatch("[0-9a-f]{64}", key)
    everything = docker("inspect", *separated("ps", "--quiet").split()) + separated("logs", "--no-color")
    assert key not in everything
    assert [inspected(shard)["Config"]["User"] for shard in shards] == ["10001:10001"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="ending a container's process from outside needs root")
def test_a_shard_that_dies_is_started_again_and_serves(separated: Composition, reference: str) -> None:
    until(lambda: serves(separated), "the gateway")
    shard = separated.container("decode-0")
    # As the kernel would; `docker kill` would count as a wish of the user.
    os.kill(inspected(shard)["State"]["Pid"], 9)
    until(lambda: inspected(shard)["RestartCount"] == 1, "its restart")

    def healed() -> bool:
        status, headers, said = asked(separated)
        if status == 200:
            assert said["generated_text"] == reference  # also while the prefill shard stands in
        return status == 200 and headers.get("x-orchestrator-import") == "hit"

    until(healed, "a separated answer")


@pytest.fixture
def launching(
    variables: dict[str, str], mounted_model: Path, tmp_path: Path, unique: str, engine_host: str
) -> Iterator[Composition]:
    """compose.gpu.yaml without its GPUs: the orchestrator launches embedded shards through the socket."""
    whole = yaml.safe_load((COMPOSE / "compose.gpu.yaml").read_text())
    orchestrator = whole["services"]["orchestrator"]
    # The one thing that only an engine with NVIDIA's runtime understands.
    del orchestrator["deploy"]
    orchestrator["environment"] |= {
        "ORCHESTRATOR_DEPLOYMENT": unique,
        "ORCHESTRATOR_ROUTING__CHOICE": "separated",
    }
    orchestrator["volumes"].append(f"{mounted_model}:/model:ro")
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump(whole))
    path = engine_host.removeprefix("unix://")
    if not path.startswith("/"):
        pytest.skip(f"The engine at {engine_host} has no socket that can be mounted.")
    more = {
        "DOCKER_SOCKET": path,
        "DOCKER_GID": str(Path(path).stat().st_gid),
        "NETWORK": f"{unique}-shards",
        "TGI_IMAGE": variables["CPU_IMAGE"],
    }
    composition = Composition(f"tgio-{uuid.uuid4().hex[:8]}", variables | more, tmp_path, file)
    try:
        composition("up", "--detach", "--no-build")
        yield composition
    finally:
        # Shards are on its network: they go first.
        composition("stop", "--timeout", "20", "orchestrator")
        remove_all(unique)
        composition("down", "--volumes", "--timeout", "20")
    assert composition.left() == []


def test_the_orchestrator_launches_shards_beside_itself_and_leaves_them_over_its_restart(
    launching: Composition, reference: str, unique: str
) -> None:
    until(lambda: serves(launching), "the gateway", limit_s=120)
    assert answered(launching)[0] == reference
    names = [f"tgio-{unique}-{shard}" for shard in ("prefill-0", "decode-0")]
    before = [inspected(name)["State"]["StartedAt"] for name in names]
    assert [list(inspected(name)["NetworkSettings"]["Networks"]) for name in names] == [
        [f"{unique}-shards"]
    ] * 2

    launching("restart", "--timeout", "30", "orchestrator")
    until(lambda: serves(launching), "the gateway after its restart")
    text, headers = answered(launching)
    assert text == reference
    assert headers["x-orchestrator-import"] == "hit"
    assert [inspected(name)["State"]["StartedAt"] for name in names] == before

    launching("stop", "--timeout", "30", "orchestrator")
    assert sorted(containers_of(unique)) == sorted(names)
    launching("run", "--rm", "--no-deps", "orchestrator", "down")
    assert left_of(unique) == []
