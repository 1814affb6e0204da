"""What a container of a shard is created with, as the engine's API has it.  Pure: no secret comes in here.

See `secrets` for the files that hold some, and `names` for labels and paths.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.order import ShardOrder
from orchestrator.core.secret_names import looks_secret
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.names import (
    ARENAS,
    ENGINE_LABEL,
    SECRETS,
    SHARD_LABEL,
    SPEC_LABEL,
    TGI_LABEL,
    labels,
    volume_name,
)
from orchestrator.shards.docker.order_label import written
from tgi_patches.contract import KEY_FILE_VARIABLE, Role, ShardSpec

HOST_NETWORK = "host"
PORT = 3000
"""Of a shard whose order names none: on a bridge every container has an address of its own."""
KEY_FILE = "key"
"""Name of the file with the deployment's key, among the secrets."""
EMBEDDED_COMMAND = ("python3", "-m", "orchestrator.embedded.shard")
TGI_STOP_S = 120
"""TGI finishes its requests first."""
EMBEDDED_STOP_S = 10
LOG_FILES = 2
MPS_PIPE = "/tmp/nvidia-mps"
"""Where MPS's control daemon listens, on the host and in containers."""
CDI_MARK = "="
_SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:TOKEN|KEYS?|SECRETS?|PASS|PASSWORD|CREDENTIALS?)$")
"""Of a variable; those of limits in tokens end otherwise."""
_FLAGS = {Role.PREFILL: ("--prefill-specialization",), Role.DECODE: ("--decode-specialization",)}


@dataclass(frozen=True, slots=True)
class Bind:
    """A folder of the host, or a volume by its name, in a container."""

    source: str
    target: str
    read_only: bool = True

    @property
    def mount(self) -> dict[str, Any]:
        """As a mount, not as `source:target`: a folder that is missing is refused and never made by root."""
        kind = "bind" if self.source.startswith("/") else "volume"
        return {"Type": kind, "Source": self.source, "Target": self.target, "ReadOnly": self.read_only}


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What an image says of itself."""

    name: str
    labels: Mapping[str, str]
    user: str = ""
    id: str = ""

    @property
    def tgi(self) -> bool:
        """False for the embedded shard.  ConfigError for an image that is neither."""
        if TGI_LABEL in self.labels:
            return True
        if self.labels.get(ENGINE_LABEL) == "embedded":
            return False
        raise ConfigError(
            f"The image {self.name} is no shard: it has neither the label {TGI_LABEL} nor {ENGINE_LABEL}; "
            "build one as docs/container.md says."
        )


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the containers of a deployment stand: the same for all of its shards."""

    deployment: str
    network: str
    """Of a bridge by name, or `host`."""
    owner: str = ""
    """Of all that is launched; empty asks nobody's."""
    mounts: tuple[Bind, ...] = ()
    secrets: frozenset[str] = frozenset()
    """Names of the files in SECRETS."""
    user: str = ""
    """`uid:gid`; empty for the image's own."""
    log_bytes: int = 16 * 1024 * 1024
    host_cpus: int = 1
    cdi: bool = False
    """The engine reads CDI names."""

    @property
    def on_host(self) -> bool:
        return self.network == HOST_NETWORK


def create_body(order: ShardOrder, image: ImageFacts, ground: Ground) -> dict[str, Any]:
    """Of `POST /containers/create`.  ConfigError in a sentence for what cannot work."""
    _check(order, image, ground)
    command = [*_FLAGS.get(order.role, ()), *order.args] if image.tgi else []
    body: dict[str, Any] = {
        "Image": image.id or order.image,
        "Cmd": command,
        "Env": [f"{name}={value}" for name, value in environment(order, image, ground).items()],
        "Labels": {
            **labels(ground.deployment, ground.owner),
            SHARD_LABEL: order.shard,
            SPEC_LABEL: written(order),
        },
        "StopSignal": "SIGTERM",
        "StopTimeout": TGI_STOP_S if image.tgi else EMBEDDED_STOP_S,
        "HostConfig": host_config(order, image, ground),
    }
    if not image.tgi:
        body["Entrypoint"] = list(EMBEDDED_COMMAND)
    if ground.user:
        body["User"] = ground.user
    if not ground.on_host:
        body["NetworkingConfig"] = {"EndpointsConfig": {ground.network: {}}}
    return body


def host_config(order: ShardOrder, image: ImageFacts, ground: Ground) -> dict[str, Any]:
    """Limits, devices and mounts.  Memory and swap together have one limit: a shard never swaps."""
    arenas = Bind(volume_name(ground.deployment), ARENAS, read_only=False).mount
    arenas["VolumeOptions"] = {"NoCopy": True}  # the tmpfs keeps the owner and mode that it was made with
    mounts = [arenas, *(bind.mount for bind in ground.mounts)]
    made: dict[str, Any] = confined(ground.network, ground.log_bytes)
    if not image.tgi:
        # TGI's container has a first process of its own that reaps and passes signals on.
        made["Init"] = True
    if order.memory_bytes:
        made |= {"Memory": order.memory_bytes, "MemorySwap": order.memory_bytes}
    if order.cpus:
        made["CpusetCpus"] = ",".join(str(core) for core in order.cpus)
    if order.mps_percent:
        made["IpcMode"] = "host"  # whose /dev/shm it has then: a size is the host's to give
        mounts.append(Bind(MPS_PIPE, MPS_PIPE, read_only=False).mount)
    elif order.shm_bytes:
        made["ShmSize"] = order.shm_bytes
    if order.gpus:
        made["DeviceRequests"] = device_requests(order.gpus)
    return made | {"Mounts": mounts}


def confined(network: str, log_bytes: int) -> dict[str, Any]:
    """What every container of ours has: no right that it does not need, and nobody but us starts it."""
    return {
        "NetworkMode": network,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": str(log_bytes), "max-file": str(LOG_FILES)},
        },
    }


def device_requests(gpus: Sequence[str]) -> list[dict[str, Any]]:
    """GPUs by name, never by count: a count takes the first ones, whoever has them."""
    cdi, named = _split(gpus)
    requests = []
    if named:
        requests.append(_request("", named, [["gpu"]]))
    if cdi:
        requests.append(_request("cdi", cdi, []))
    return requests


def environment(order: ShardOrder, image: ImageFacts, ground: Ground) -> dict[str, str]:
    """What the order itself names wins, but for the spec."""
    _, named = _split(order.gpus)
    # An image made for CUDA asks for all GPUs, which a runtime of NVIDIA's would grant.
    env = {"HF_HUB_OFFLINE": "1", "NVIDIA_VISIBLE_DEVICES": ",".join(named) or "void"}
    if image.tgi:
        env |= _tgi_ports(order, ground)
    else:
        env["OMP_NUM_THREADS"] = str(len(order.cpus) or ground.host_cpus)
    if order.mps_percent:
        env |= {
            "CUDA_MPS_PIPE_DIRECTORY": MPS_PIPE,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(order.mps_percent),
        }
    if order.gpu_memory_fraction:
        env["CUDA_MEMORY_FRACTION"] = f"{order.gpu_memory_fraction:g}"
    if KEY_FILE in ground.secrets:
        env[KEY_FILE_VARIABLE] = f"{SECRETS}/{KEY_FILE}"
    return {**env, **order.env, **spec_inside(order, ground).to_env()}


def spec_inside(order: ShardOrder, ground: Ground) -> ShardSpec:
    """What the shard is told: where it listens, and the arenas, as its container has them."""
    host = "127.0.0.1" if ground.on_host else "0.0.0.0"
    return dataclasses.replace(order.spec, host=host, port=order.port or PORT, arena_dir=ARENAS)


def _tgi_ports(order: ShardOrder, ground: Ground) -> dict[str, str]:
    """Two more ports that TGI takes; they matter only where several containers share one network."""
    if not ground.on_host:
        return {}
    return {"PROMETHEUS_PORT": str(order.port + 2), "MASTER_PORT": str(order.port + 3)}


def _split(gpus: Sequence[str]) -> tuple[list[str], list[str]]:
    """CDI names, and all others."""
    return [gpu for gpu in gpus if CDI_MARK in gpu], [gpu for gpu in gpus if CDI_MARK not in gpu]


def _request(driver: str, ids: list[str], capabilities: list[list[str]]) -> dict[str, Any]:
    return {"Driver": driver, "Count": 0, "DeviceIDs": ids, "Capabilities": capabilities, "Options": {}}


def _check(order: ShardOrder, image: ImageFacts, ground: Ground) -> None:
    shard = f"Shard {order.shard}"
    if not image.tgi and (order.gpus or order.args):
        what = "GPUs" if order.gpus else "arguments"
        raise ConfigError(f"{shard} is given {what}, and {image.name} is the embedded shard, which has none.")
    if len(set(order.gpus)) != len(order.gpus):
        raise ConfigError(f"{shard} is given a GPU twice: {', '.join(order.gpus)}.")
    cdi, named = _split(order.gpus)
    if cdi and not ground.cdi:
        raise ConfigError(
            f"{shard} is given {cdi[0]} by its CDI name, which this Docker engine does not read: enable CDI "
            "(Docker 25 or later) or name the GPU's UUID."
        )
    if any(gpu.casefold() == "all" for gpu in named):
        raise ConfigError(f"{shard} is given all GPUs: name each by its UUID.")
    if ground.on_host and not order.port:
        raise ConfigError(f"{shard} needs a port of its own on the host's network.")
    check_environment(shard, {**order.tgi_env, **order.env})


def check_environment(who: str, env: Mapping[str, str]) -> None:
    """ConfigError for a secret: everybody sees it who may ask the engine."""
    for name, value in env.items():
        if _SECRET_NAME.search(name) or looks_secret(value):
            raise ConfigError(
                f"{who} is given {name} in its environment, which everybody sees who may ask the engine: "
                "secrets go into files (model.token_file, key_file)."
            )
