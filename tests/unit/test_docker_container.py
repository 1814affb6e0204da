"""What the engine is sent for a shard, compared with JSON as the engine's API documents it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.order import ShardOrder
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import (
    Bind,
    Ground,
    ImageFacts,
    create_body,
    device_requests,
    spec_inside,
)
from orchestrator.shards.docker.order_label import read, written
from tgi_patches.contract import Role, ShardSpec

MIB = 2**20
TGI = ImageFacts("tgi-orchestrator-shard:3.3.7", {"tgi-orchestrator.tgi": "3.3.7"}, "10001:10001")
CPU = ImageFacts("tgi-orchestrator-cpu:1", {"tgi-orchestrator.engine": "embedded"}, "10001:10001")
GROUND = Ground(
    deployment="demo",
    network="tgio-demo",
    mounts=(Bind("/srv/models", "/data"),),
    secrets=frozenset({"key"}),
    log_bytes=1000,
    host_cpus=8,
)


def order(image: ImageFacts = CPU, **changes: Any) -> ShardOrder:
    return ShardOrder("demo", "d0", Role.DECODE, "m", "name", image=image.name, **changes)


def env_of(body: dict[str, Any]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in body["Env"])


def test_the_body_for_an_embedded_shard_is_this() -> None:
    wanted = order(port=3100, arena_dir="/dev/shm/x", memory_bytes=512 * MIB, cpus=(2, 3), shm_bytes=MIB)
    body = create_body(wanted, CPU, GROUND)
    spec = json.loads(env_of(body).pop("ORCHESTRATOR_SHARD_SPEC"))
    assert (spec["host"], spec["port"], spec["arena_dir"]) == ("0.0.0.0", 3100, "/arenas")
    assert "image" not in spec
    label = body["Labels"].pop("tgi-orchestrator.spec")
    body["Env"] = [line for line in body["Env"] if not line.startswith("ORCHESTRATOR_SHARD_SPEC=")]
    assert body == {
        "Image": "tgi-orchestrator-cpu:1",
        "Entrypoint": ["python3", "-m", "orchestrator.embedded.shard"],
        "Cmd": [],
        "Env": [
            "HF_HUB_OFFLINE=1",
            "NVIDIA_VISIBLE_DEVICES=void",
            "OMP_NUM_THREADS=2",
            "ORCHESTRATOR_DEPLOYMENT_KEY_FILE=/run/tgi-orchestrator/key",
        ],
        "Labels": {"tgi-orchestrator.deployment": "demo", "tgi-orchestrator.shard": "d0"},
        "StopSignal": "SIGTERM",
        "StopTimeout": 10,
        "NetworkingConfig": {"EndpointsConfig": {"tgio-demo": {}}},
        "HostConfig": {
            "NetworkMode": "tgio-demo",
            "Privileged": False,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1000", "max-file": "2"}},
            "Init": True,
            "Memory": 512 * MIB,
            "MemorySwap": 512 * MIB,
            "CpusetCpus": "2,3",
            "ShmSize": MIB,
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": "tgio-demo-arenas",
                    "Target": "/arenas",
                    "ReadOnly": False,
                    "VolumeOptions": {"NoCopy": True},
                },
                {"Type": "bind", "Source": "/srv/models", "Target": "/data", "ReadOnly": True},
            ],
        },
    }
    assert read(label) == wanted


@pytest.mark.parametrize(
    ("gpus", "sent"),
    [
        (
            ("GPU-8f1c", "GPU-0a2b"),
            [
                {
                    "Driver": "",
                    "Count": 0,
                    "DeviceIDs": ["GPU-8f1c", "GPU-0a2b"],
                    "Capabilities": [["gpu"]],
                    "Options": {},
                }
            ],
        ),
        (
            ("MIG-7c1d",),
            [
                {
                    "Driver": "",
                    "Count": 0,
                    "DeviceIDs": ["MIG-7c1d"],
                    "Capabilities": [["gpu"]],
                    "Options": {},
                }
            ],
        ),
        (
            ("nvidia.com/gpu=0", "nvidia.com/gpu=GPU-8f1c"),
            [
                {
                    "Driver": "cdi",
                    "Count": 0,
                    "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-8f1c"],
                    "Capabilities": [],
                    "Options": {},
                }
            ],
        ),
    ],
)
def test_gpus_are_asked_for_by_name_and_by_nothing_else(
    gpus: tuple[str, ...], sent: list[dict[str, Any]]
) -> None:
    body = create_body(order(TGI, gpus=gpus, tensor_parallel=len(gpus)), TGI, replace(GROUND, cdi=True))
    assert body["HostConfig"]["DeviceRequests"] == sent
    named = [gpu for gpu in gpus if "=" not in gpu]
    assert env_of(body)["NVIDIA_VISIBLE_DEVICES"] == (",".join(named) or "void")


def test_a_gpu_is_shared_by_mps_with_its_pipe_and_the_hosts_ipc() -> None:
    wanted = order(TGI, gpus=("GPU-1",), mps_percent=40, gpu_memory_fraction=0.45, shm_bytes=MIB)
    body = create_body(wanted, TGI, GROUND)
    host, env = body["HostConfig"], env_of(body)
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert env["CUDA_MEMORY_FRACTION"] == "0.45"
    assert host["IpcMode"] == "host"
    assert "ShmSize" not in host
    pipe = {"Type": "bind", "Source": "/tmp/nvidia-mps", "Target": "/tmp/nvidia-mps", "ReadOnly": False}
    assert pipe in host["Mounts"]


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        (Role.PREFILL, ["--prefill-specialization"]),
        (Role.DECODE, ["--decode-specialization"]),
        (Role.MIXED, []),
    ],
)
def test_tgi_gets_its_phase_and_the_arguments_of_the_order_behind_it(role: Role, flags: list[str]) -> None:
    wanted = replace(order(TGI, args=("--max-batch-size", "4"), env={"A": "1"}), role=role)
    body = create_body(wanted, TGI, GROUND)
    assert body["Cmd"] == [*flags, "--max-batch-size", "4"]
    assert "Entrypoint" not in body
    assert "Init" not in body["HostConfig"]
    assert body["StopTimeout"] == 120
    env = env_of(body)
    assert env["A"] == "1"
    assert "OMP_NUM_THREADS" not in env


def test_on_the_hosts_network_only_this_host_reaches_a_shard_and_tgis_ports_differ() -> None:
    ground = replace(GROUND, network="host")
    wanted = order(TGI, port=3100, sidecar_port=3101)
    body = create_body(wanted, TGI, ground)
    assert "NetworkingConfig" not in body
    assert spec_inside(wanted, ground).host == "127.0.0.1"
    env = env_of(body)
    assert (env["PROMETHEUS_PORT"], env["MASTER_PORT"]) == ("3102", "3103")
    moved = create_body(replace(wanted, env={"MASTER_PORT": "9"}), TGI, ground)
    assert env_of(moved)["MASTER_PORT"] == "9"


def test_the_order_wins_in_the_environment_but_not_over_what_it_says_itself() -> None:
    env = {"OMP_NUM_THREADS": "1", "ORCHESTRATOR_SHARD_SPEC": "{}"}
    told = env_of(create_body(order(env=env), CPU, GROUND))
    assert told["OMP_NUM_THREADS"] == "1"
    assert ShardSpec.from_env(told).shard == "d0"
    assert env_of(create_body(order(), CPU, GROUND))["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("wanted", "image", "ground", "sentence"),
    [
        (order(), ImageFacts("x:1", {"a": "b"}), GROUND, "The image x:1 is no shard"),
        (order(gpus=("GPU-1",)), CPU, GROUND, "is given GPUs, and tgi-orchestrator-cpu:1 is the embedded"),
        (order(args=("--x",)), CPU, GROUND, "is given arguments, and"),
        (order(TGI, gpus=("GPU-1", "GPU-1")), TGI, GROUND, "is given a GPU twice: GPU-1, GPU-1."),
        (order(TGI, gpus=("nvidia.com/gpu=0",)), TGI, GROUND, "nvidia.com/gpu=0 by its CDI name, which this"),
        (order(TGI, gpus=("all",)), TGI, GROUND, "is given all GPUs: name each by its UUID."),
        (order(), CPU, replace(GROUND, network="host"), "needs a port of its own on the host's network."),
        (order(env={"HF_TOKEN": "x"}), CPU, GROUND, "is given HF_TOKEN in its environment"),
        (order(tgi_env={"MY_API_KEY": "x"}), CPU, GROUND, "is given MY_API_KEY in its environment"),
        (order(env={"P": "http://me:pass@proxy"}), CPU, GROUND, "is given P in its environment"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    wanted: ShardOrder, image: ImageFacts, ground: Ground, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        create_body(wanted, image, ground)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_in_tokens_are_no_secrets() -> None:
    env = {"MAX_INPUT_TOKENS": "5", "MAX_BATCH_PREFILL_TOKENS": "6", "KEYBOARD": "7"}
    assert env_of(create_body(order(TGI, env=env), TGI, GROUND)).items() >= env.items()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"version": 1}', '{"version": 2, "deployment": "d"}', "\x00"],
)
def test_a_label_that_is_none_of_ours_is_no_order(text: str) -> None:
    assert read(text) is None


def test_an_order_of_another_version_is_none_of_ours() -> None:
    raw = json.loads(written(order()))
    assert read(json.dumps(raw)) == order()
    assert read(json.dumps(raw | {"later": 1})) == order(), "what a later one adds is passed over"
    assert read(json.dumps(raw | {"version": 2})) is None


# --- whatever is ordered ------------------------------------------------------------------------

GPUS = st.lists(
    st.sampled_from(["GPU-1", "GPU-2", "MIG-3", "nvidia.com/gpu=0", "nvidia.com/gpu=1"]), unique=True
)


@given(gpus=GPUS)
def test_no_request_of_devices_counts_and_each_gpu_is_in_one(gpus: list[str]) -> None:
    requests = device_requests(gpus)
    assert sorted(one for request in requests for one in request["DeviceIDs"]) == sorted(gpus)
    assert all(request["Count"] == 0 and request["DeviceIDs"] for request in requests)


@given(
    gpus=GPUS,
    role=st.sampled_from(list(Role)),
    network=st.sampled_from(["host", "bridge", "mine"]),
    memory=st.integers(0, 2**40),
    percent=st.integers(0, 100),
    user=st.sampled_from(["", "0:10001", "7:8"]),
    tgi=st.booleans(),
)
def test_no_container_is_privileged_publishes_a_port_or_starts_by_itself(
    gpus: list[str], role: Role, network: str, memory: int, percent: int, user: str, tgi: bool
) -> None:
    image = TGI if tgi else CPU
    wanted = order(image, gpus=tuple(gpus if tgi else ()), memory_bytes=memory, mps_percent=percent, port=7)
    body = create_body(
        replace(wanted, role=role), image, replace(GROUND, network=network, user=user, cdi=True)
    )
    host = body["HostConfig"]
    assert (host["Privileged"], host["CapDrop"]) == (False, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert not {"PortBindings", "PublishAllPorts", "CapAdd", "Devices", "PidMode", "AutoRemove"} & set(host)
    assert "ExposedPorts" not in body
    assert host.get("Memory", 0) == host.get("MemorySwap", 0) == memory
    assert body.get("User", "") == user
    assert json.loads(json.dumps(body)) == body
