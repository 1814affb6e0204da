"""Parts of the Docker launcher that need no engine."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import ImageFacts
from orchestrator.shards.docker.ground import size_of
from orchestrator.shards.docker.listing import found_in
from orchestrator.shards.docker.order_label import written
from orchestrator.shards.docker.refusals import sentence
from orchestrator.shards.docker.secrets import archive, owner_of
from orchestrator.shards.docker.weights import Wanted, task_body
from tgi_patches.contract import Role

ORDER = ShardOrder("demo", "d0", Role.DECODE, "m", "n", port=3100, sidecar_port=3101)


def listed(**changes: Any) -> dict[str, Any]:
    labels = {
        "tgi-orchestrator.deployment": "demo",
        "tgi-orchestrator.shard": "d0",
        "tgi-orchestrator.spec": written(ORDER),
    }
    entry: dict[str, Any] = {
        "Id": "f00",
        "Names": ["/tgio-demo-d0"],
        "State": "running",
        "Labels": labels,
        "NetworkSettings": {"Networks": {"tgio-demo": {"IPAddress": "172.18.0.2"}}},
    }
    return entry | changes


# --- what the engine lists ----------------------------------------------------------------------


def test_a_shard_is_found_with_its_address_and_its_order() -> None:
    running = found_in(listed()).running
    assert (running.url, running.sidecar_url) == ("http://172.18.0.2:3100", "http://172.18.0.2:3101")
    assert (running.shard, running.order, running.pid) == ("d0", ORDER, None)


def test_on_the_hosts_network_it_is_at_this_host() -> None:
    networks = {"Networks": {"host": {"IPAddress": ""}}}
    assert found_in(listed(NetworkSettings=networks)).running.url == "http://127.0.0.1:3100"


@pytest.mark.parametrize(
    ("state", "alive"),
    [("running", True), ("paused", True), ("created", False), ("exited", False), ("dead", False)],
)
def test_only_what_can_still_answer_is_alive(state: str, alive: bool) -> None:
    assert found_in(listed(State=state)).alive is alive


@pytest.mark.parametrize(
    "changes",
    [
        {"Names": ["/other"]},
        {"Labels": {"tgi-orchestrator.deployment": "demo"}},
        {"Labels": listed()["Labels"] | {"tgi-orchestrator.shard": "d1"}},
        {"Labels": listed()["Labels"] | {"tgi-orchestrator.deployment": "two"}},
        {"Labels": listed()["Labels"] | {"tgi-orchestrator.spec": '{"version": 99}'}},
    ],
)
def test_what_contradicts_itself_is_a_stranger(changes: dict[str, Any]) -> None:
    assert not found_in(listed()).stranger
    assert found_in(listed(**changes)).stranger


# --- what the engine refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            "needs a GPU and this engine gives none",
        ),
        (
            "OCI runtime failed: ... nvidia-container-cli: device error: GPU-9: unknown device: unknown",
            "is to have the GPU GPU-9, which this host does not have",
        ),
        (
            "nvidia-container-cli: nvml error: driver not loaded",
            "was given no GPU by NVIDIA's container toolkit (nvml error: driver not loaded)",
        ),
        (
            "could not inject: unresolvable CDI devices nvidia.com/gpu=9",
            "is to have nvidia.com/gpu=9 by CDI, which this host does not have",
        ),
        (
            "Requested CPUs are not available - requested 99, available: 0-1",
            "(requested 99, available: 0-1).",
        ),
        ("Minimum memory limit allowed is 6MB", "a memory limit below the 6MB that Docker allows"),
        (
            "invalid mount config for type bind: bind source path does not exist: /tmp/nvidia-mps",
            "NVIDIA's MPS does not run",
        ),
        (
            "invalid mount config for type bind: bind source path does not exist: /srv/x.",
            "is to get the folder /srv/x, which",
        ),
        (
            'exec: \\"python3\\": executable file not found in $PATH: unknown',
            "cannot start: its image has no python3.",
        ),
        ("network tgio-x not found", "is to be in the network tgio-x, which this engine does not have"),
    ],
)
def test_what_no_second_try_mends_is_said_in_a_sentence(told: str, expected: str) -> None:
    said = sentence("Shard d0", f"Shard d0 did not start: {told}.")
    assert said.startswith("Shard d0 ")
    assert expected in said


@pytest.mark.parametrize("told", ["", "Conflict. The container name is in use", "no space left on device"])
def test_what_may_pass_is_left_to_the_next_try(told: str) -> None:
    assert sentence("Shard d0", told) == ""


# --- secrets ------------------------------------------------------------------------------------


def test_secrets_are_packed_for_one_user_to_read() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive({"key": b"abc"}, (7, 8)))) as tar:
        folder, file = tar.getmembers()
        assert (folder.name, folder.isdir(), folder.mode) == ("run/tgi-orchestrator", True, 0o500)
        assert (file.name, file.mode, file.uid, file.gid) == ("run/tgi-orchestrator/key", 0o400, 7, 8)
        packed = tar.extractfile(file)
        assert packed is not None
        assert packed.read() == b"abc"


@pytest.mark.parametrize(
    ("user", "owner"), [("", (0, 0)), ("7", (7, 0)), ("7:8", (7, 8)), ("0:10001", (0, 10_001))]
)
def test_the_owner_of_secrets_is_the_containers_user(user: str, owner: tuple[int, int]) -> None:
    assert owner_of(user, "x:1") == owner


@pytest.mark.parametrize("user", ["tgi", "7:tgi", "-1", "7:8:9"])
def test_a_user_that_only_the_image_knows_is_refused(user: str) -> None:
    with pytest.raises(ConfigError, match="x:1 runs as"):
        owner_of(user, "x:1")


@pytest.mark.parametrize(
    ("options", "size"),
    [("size=100,uid=1", 100), ("uid=1,size=7", 7), ("uid=1", 0), ("size=10%", 0), ("", 0)],
)
def test_the_size_of_a_tmpfs_is_read_from_its_options(options: str, size: int) -> None:
    assert size_of(options) == size


# --- the container that fetches weights ---------------------------------------------------------

TGI = ImageFacts("t:1", {"tgi-orchestrator.tgi": "3.3.7"})
CPU = ImageFacts("c:1", {"tgi-orchestrator.engine": "embedded"})


def test_the_hubs_token_is_in_nothing_that_the_engine_shows() -> None:
    wanted = Wanted(
        "t:1", "org/model", "abc", token=b"hf_secret-of-somebody", env={"HF_ENDPOINT": "http://h"}
    )
    for image in (TGI, CPU):
        body = task_body("demo", wanted, image)
        assert "hf_secret" not in str(body)
        assert body["HostConfig"]["CapDrop"] == ["ALL"]
        assert "HF_HUB_OFFLINE=1" not in body["Env"], "this one asks the hub"
        assert body["Labels"] == {
            "tgi-orchestrator.deployment": "demo",
            "tgi-orchestrator.task": "weights",
        }
    assert "hf_secret" not in repr(wanted)


def test_each_image_fetches_with_its_own_program() -> None:
    wanted = Wanted("c:1", "org/model", "abc", cache="/cache", token=b"x" * 20)
    embedded, tgi = task_body("demo", wanted, CPU), task_body("demo", wanted, TGI)
    assert embedded["Entrypoint"] == ["python3", "-m", "orchestrator.embedded.fetch"]
    assert embedded["Cmd"] == [
        *("org/model", "--cache", "/cache", "--revision", "abc"),
        *("--token-file", "/run/tgi-orchestrator/hub-token"),
    ]
    assert tgi["Entrypoint"][:2] == ["/bin/sh", "-c"]
    assert tgi["Cmd"] == ["org/model", "--revision", "abc"]


def test_a_secret_in_the_environment_of_a_fetch_is_refused() -> None:
    with pytest.raises(ConfigError, match="is given HF_TOKEN in its environment"):
        task_body("demo", Wanted("c:1", "m", env={"HF_TOKEN": "x"}), CPU)
