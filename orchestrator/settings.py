"""What a deployment can be told: every key of its settings, with its default and its bounds."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from tgi_patches.contract import ContractError, checked_part

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _absolute(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, (str, Path)) else value


def _on_path(value: object) -> object:
    """A bare name is looked up as a shell would; what is not found stays a path."""
    bare = isinstance(value, str) and "/" not in value
    return (shutil.which(str(value)) or value) if bare else value


AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) or value.startswith("ORCHESTRATOR_"):
        raise ValueError(f"{value!r} is no variable that a shard can be given")
    return value


def _network(value: str) -> str:
    if value in ("none", "bridge", "default") or ":" in value:
        raise ValueError("must be a network of its own, where containers have names, or host")
    return value


EnvName = Annotated[str, AfterValidator(_env_name)]
Gpu = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=64)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Tokens = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    id: str = Field(DEFAULT_MODEL, min_length=1)
    """A hub id or a local folder."""
    revision: str | None = None
    token_file: AbsolutePath | None = None
    """A file that holds a hub token; the token itself is never a setting."""
    cache: AbsolutePath = Field(default=Path("~/.cache/tgi-orchestrator"), validate_default=True)
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"


def _base_url(value: str) -> str:
    """`http://host:port`: a shard's own address, with nothing behind it."""
    parts = urlsplit(value)
    try:
        behind = parts.path.strip("/") or parts.query or parts.fragment
        whole = parts.scheme == "http" and parts.hostname and parts.port and not behind
    except ValueError:
        whole = False
    if not whole:
        raise ValueError("must look like http://10.0.0.1:3001")
    if parts.username is not None:
        raise ValueError("must look like http://10.0.0.1:3001, without a user: no shard asks for one")
    return value.rstrip("/")


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must look like 127.0.0.1:3000")
    return value


def _address_or_none(value: str) -> str:
    return value and _address(value)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port`, without the brackets of IPv6; port 0 lets the system choose."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Address = Annotated[str, AfterValidator(_address)]
"""`host:port`; an IPv6 host in brackets; port 0 lets the system choose."""
BaseUrl = Annotated[str, AfterValidator(_base_url)]


class RoleSection(Section):
    count: Count = 0
    urls: list[BaseUrl] = []
    """Shards of this role that somebody else starts and keeps; none is launched then."""
    sidecar_port: int = Field(0, ge=0, le=65_535)
    """Of the sidecar at each of `urls`, where it is a process of its own; 0: the shard's own port."""
    cpus: list[list[Annotated[int, Field(ge=0)]]] = []
    """CPU cores, one list per shard; empty lets the launcher choose."""
    gpus: list[list[Gpu]] = []
    """GPUs by UUID, MIG UUID or CDI name, one list per shard; empty lets placement choose."""
    tp: int = Field(1, ge=1, le=64)
    image: str | None = None
    """Of the containers; None for `docker.image`."""
    args: list[str] = []
    """Further arguments of the image's own command: TGI's flags."""
    env: dict[EnvName, str] = {}
    memory_bytes: int = Field(0, ge=0)
    """Memory of a container beside its arena; 0 chooses for embedded shards and sets TGI no limit."""
    shm_bytes: int = Field(0, ge=0)
    """Size of a container's /dev/shm; 0: 1 GiB for a shard of several ranks, else 64 MiB."""
    mps_percent: int = Field(0, ge=0, le=100)
    """Share of each GPU's threads, by NVIDIA's MPS; 0: GPUs of its own."""
    gpu_memory_fraction: float = Field(0.0, ge=0, le=1)
    """Share of each GPU's memory; needed beside `mps_percent`."""

    @model_validator(mode="after")
    def _lists_match_count(self) -> Self:
        if self.urls and "count" in self.model_fields_set and self.count != len(self.urls):
            raise ValueError(f"urls names {len(self.urls)} shards and count {self.count}: leave count out")
        if self.cpus and len(self.cpus) != self.shards:
            raise ValueError(f"cpus names {len(self.cpus)} lists of cores for {self.shards} shards")
        if self.gpus and len(self.gpus) != self.shards:
            raise ValueError(f"gpus names {len(self.gpus)} lists of GPUs for {self.shards} shards")
        for gpus in self.gpus:
            if len(gpus) != self.tp:
                raise ValueError(f"gpus names {len(gpus)} GPUs for a shard of {self.tp} ranks (tp)")
        return self

    @model_validator(mode="after")
    def _shares_of_a_gpu(self) -> Self:
        if bool(self.mps_percent) != bool(self.gpu_memory_fraction):
            raise ValueError("mps_percent and gpu_memory_fraction need each other: a share of both")
        return self

    @property
    def shards(self) -> int:
        """How many there are, launched or not."""
        return len(self.urls) or self.count


class OneByDefault(RoleSection):
    count: Count = 1


class ShardsSection(Section):
    prefill: OneByDefault = OneByDefault()
    decode: OneByDefault = OneByDefault()
    mixed: RoleSection = RoleSection()

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        if self.prefill.shards + self.decode.shards + self.mixed.shards == 0:
            raise ValueError("at least one shard is needed")
        return self

    @model_validator(mode="after")
    def _each_its_own_url(self) -> Self:
        seen: set[tuple[str | None, int | None]] = set()
        for url in (*self.prefill.urls, *self.decode.urls, *self.mixed.urls):
            parts = urlsplit(url)
            if (address := (parts.hostname, parts.port)) in seen:
                raise ValueError(f"{url} is named twice in urls: each shard has an address of its own")
            seen.add(address)
        return self


class GatewaySection(Section):
    listen: Address = "127.0.0.1:3000"
    workers: int = Field(1, ge=1, le=64)
    """Processes that share the port."""
    tls_cert: AbsolutePath | None = None
    """A certificate chain as PEM; with it clients speak HTTPS."""
    tls_key: AbsolutePath | None = None
    keys_file: AbsolutePath | None = None
    """API keys by name, and their limits; without any key everybody of this machine is served."""
    allow_anonymous: bool = False
    """Serve without API keys on an address that other machines reach."""
    admin_listen: Annotated[str, AfterValidator(_address_or_none)] = ""
    """An address of its own for `/admin` and `/metrics`; empty: that of the clients."""
    admin_token_file: AbsolutePath | None = None
    """A file with the token that `/admin` and `/metrics` then ask for."""
    body_timeout_s: Seconds = 30.0
    """How long a client may take to send a request's head, and as long again for its body."""
    connect_timeout_s: Seconds = 2.0
    first_event_timeout_s: Seconds = 60.0
    """How long a shard may take to the first event of an answer: its queue and a whole prefill."""
    wait_timeout_s: Seconds = 5.0
    """How long the gateway waits for a KV record after the put leg."""
    idle_timeout_s: Seconds = 60.0
    """How long a shard may stay silent within an answer."""
    keep_alive_s: Seconds = 15.0

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            here, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{here} needs {missing} beside it")
        return self

    @model_validator(mode="after")
    def _administration_elsewhere(self) -> Self:
        """By its port: a request is told apart by where it came in."""
        if self.admin_listen and self.port != 0 and self.port == host_and_port(self.admin_listen)[1]:
            raise ValueError(f"admin_listen and listen have the port {self.port}: each needs its own")
        return self

    @property
    def host(self) -> str:
        """The address, without the brackets of IPv6."""
        return host_and_port(self.listen)[0]

    @property
    def admin_host(self) -> str:
        """The same of `admin_listen`; empty where there is none."""
        return host_and_port(self.admin_listen)[0] if self.admin_listen else ""

    @property
    def port(self) -> int:
        """0 lets the system choose."""
        return host_and_port(self.listen)[1]


class SloSection(Section):
    """Objectives that routing tries to keep; None leaves the cheapest way."""

    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(None, gt=0, allow_inf_nan=False)


class RoutingSection(Section):
    choice: Literal["auto", "separated", "mixed"] = "auto"
    """Whether requests are split: as the cost model says, whenever they can be, or never."""
    calibrate: bool = True
    """Measure a shard of a kind that was never measured with a few prompts, once it is ready."""
    hot_prompts: Literal["auto", "on", "off"] = "auto"
    """Identical prompts share one prefill, bursts keep to some decode shards; auto: from 2 of those on."""
    hot_decode_share: float = Field(0.25, gt=0, le=1)
    """Share of the decode shards that a burst may have, at least one."""


class RedisSection(Section):
    url: str | None = None
    """None starts an embedded server."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return value


class LimitsSection(Section):
    max_input_tokens: Tokens = 4095
    max_total_tokens: Tokens = 4096
    max_batch_prefill_tokens: Tokens = 4096
    max_concurrent_requests: Tokens = 128
    """Requests that one shard holds, and one gateway."""
    queue_size: int = Field(256, ge=0)
    request_timeout_s: Seconds = 300.0
    payload_bytes: int = Field(2_000_000, gt=0)

    @model_validator(mode="after")
    def _input_below_total(self) -> Self:
        if self.max_input_tokens >= self.max_total_tokens:
            raise ValueError(
                f"max_input_tokens ({self.max_input_tokens}) must be below "
                f"max_total_tokens ({self.max_total_tokens})"
            )
        return self


class ArenaSection(Section):
    dir: AbsolutePath | None = None
    bytes: int = Field(0, ge=0)
    """Ring size of a shard that exports; 0 chooses from the model and the free memory."""
    record_ttl_s: Seconds = 60.0
    pinned_bytes: int = Field(0, ge=0)
    """Beside the ring, for records of hot prompts; 0 makes it an eighth of it, where there may be such."""
    pull_listen: Annotated[str, AfterValidator(_address_or_none)] = ""
    """Where a prefill shard offers its records to other hosts; empty: nowhere."""
    pulled_bytes: int = Field(0, ge=0)
    """Ring of a decode shard's copies of records from other hosts; 0 chooses, where there are such."""

    def directory(self) -> Path:
        """The tmpfs folder that all shards of this host map."""
        return self.dir or Path(f"/dev/shm/tgi-orchestrator-{os.getuid()}")


class DockerSection(Section):
    """Where and how containers run, for the launcher `docker`."""

    host: str = ""
    """The engine, as DOCKER_HOST has it; empty: that variable, then /var/run/docker.sock."""
    image: str | None = None
    """Of all shards; None: TGI's with the overlay where there are GPUs, else the embedded CPU shard's."""
    network: Annotated[str, AfterValidator(_network)] = ""
    """An existing network for the shards, or `host`; empty: a bridge of the deployment's own."""
    topology: AbsolutePath | None = None
    """GPUs and their links as YAML, for a host whose NVML cannot be asked from here."""
    log_bytes: int = Field(16 * 1024 * 1024, ge=64 * 1024)
    """Size at which the engine begins a container's log anew; the one before is kept."""


class TgiSection(Section):
    """Drive TGI's own Python server in place of the embedded engine."""

    python: Annotated[AbsolutePath | None, BeforeValidator(_on_path)] = None
    """An interpreter that has the server installed: a path, or a command on PATH."""
    env: dict[str, str] = {}
    """Variables of that server, on top of the shard's own."""

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        if self.env and self.python is None:
            raise ValueError("tgi.env is for TGI's server: name its interpreter in tgi.python")
        return self


CONTAINER_KEYS = (
    "gpus",
    "image",
    "args",
    "env",
    "memory_bytes",
    "shm_bytes",
    "mps_percent",
    "gpu_memory_fraction",
)
"""Of a role: what only containers have."""


class Settings(Section):
    version: Literal[1] = 1
    deployment: str = "default"
    key_file: AbsolutePath | None = None
    """A file with the deployment's key; without it `up` makes one in its state folder."""
    model: ModelSection = ModelSection()
    launcher: Literal["process", "docker"] = "process"
    shards: ShardsSection = ShardsSection()
    gateway: GatewaySection = GatewaySection()
    slo: SloSection = SloSection()
    routing: RoutingSection = RoutingSection()
    redis: RedisSection = RedisSection()
    limits: LimitsSection = LimitsSection()
    arena: ArenaSection = ArenaSection()
    tgi: TgiSection = TgiSection()
    docker: DockerSection = DockerSection()

    @field_validator("deployment")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        try:
            return checked_part(value, "deployment name")
        except ContractError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _dtype_known_to_the_engine(self) -> Self:
        if self.tgi.python is not None and self.model.dtype == "int8":
            raise ValueError("model.dtype int8 is the embedded engine's; TGI's server does not have it")
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        """What no part of this version reads is refused rather than ignored."""
        for role in ("prefill", "decode", "mixed"):
            section: RoleSection = getattr(self.shards, role)
            if section.sidecar_port and not section.urls:
                raise ValueError(f"shards.{role}.sidecar_port is for shards at given urls")
            for key in CONTAINER_KEYS:
                if getattr(section, key) and self.launcher != "docker":
                    raise ValueError(f"shards.{role}.{key} needs containers: set launcher: docker")
        if self.launcher == "docker" and self.tgi.python is not None:
            raise ValueError("tgi.python is for the launcher 'process'; in containers the image decides")
        if self.launcher == "docker" and self.arena.dir is not None:
            raise ValueError("arena.dir is for the launcher 'process'; containers share a tmpfs volume")
        return self
