"""What an engine tells of a stock TGI container: image, command, environment, GPUs, mounts, ports.  Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.launcher_flags import DEFAULT_PORT, LAUNCHER, Told, told
from orchestrator.core.secret_names import names_secret
from orchestrator.errors import ConfigError

TGI_NAME = "text-generation-inference"
ENTRYPOINT = "tgi-entrypoint.sh"
"""Of TGI's image: it ends in the launcher."""
OTHER_BUILDS = ("rocm", "intel", "xpu", "gaudi", "hpu", "neuron", "trtllm", "llamacpp", "tpu", "inferentia")
"""In a tag or a name: TGI for something else than NVIDIA's GPUs, or with another engine in it."""
DEFAULT_SHM_BYTES = 64 * 1024 * 1024
ALL = -1
"""As the engine says it: a count of -1 is every GPU."""

_ENDS = frozenset({";", "&&", "||", "|", "&", ">", ">>", "<", "2>&1"})
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
CDI = "nvidia.com/gpu="
"""Begins a GPU's name in the Container Device Interface."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host, or a volume of the engine, in the container."""

    target: str
    source: str
    volume: str = ""
    """Its name; empty for a folder of the host."""

    def below(self, path: str) -> str | None:
        """What of a path of the container stands below the target, empty for the target; None elsewhere."""
        folder, whole = f"{self.target.rstrip('/')}/", f"{path.rstrip('/')}/"
        return whole.removeprefix(folder).rstrip("/") if whole.startswith(folder) else None


def joined(folder: str, rest: str) -> str:
    return f"{folder.rstrip('/')}/{rest}" if rest else folder


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the container was given: names or indices, or a count."""

    named: tuple[str, ...] = ()
    count: int = 0
    """ALL, or so many of any; 0 beside names, and for none."""

    def __bool__(self) -> bool:
        return bool(self.named) or self.count != 0


@dataclass(frozen=True, slots=True)
class Published:
    """Where a port of the container is reached on the host; host empty: everywhere."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Stock:
    """A container that runs TGI's launcher."""

    name: str
    image: str
    version: str
    """Of TGI, by the image's tag or label; empty where neither tells."""
    running: bool
    told: Told
    env: Mapping[str, str] = field(default_factory=dict)
    own_env: Mapping[str, str] = field(default_factory=dict)
    """Without what the image sets."""
    gpus: Gpus = Gpus()
    mounts: tuple[Mount, ...] = ()
    published: Published | None = None
    """Of the port that TGI listens on."""
    address: str = ""
    """`host:port` at which the container itself is reached from this host; empty where it is not."""
    shm_bytes: int = DEFAULT_SHM_BYTES
    memory_bytes: int = 0
    restart: str = ""
    """Its restart policy, where it has one."""
    compose: str = ""
    """Its project, where compose started it."""


def stock_of(inspected: Mapping[str, Any], image_env: Mapping[str, str]) -> Stock:
    """From `docker inspect`; `image_env` is what its image sets.

    Raises ConfigError for a container that does not run TGI, for one of another build, and for a shard
    of ours.
    """
    name = str(inspected["Name"]).lstrip("/")
    config, host = inspected["Config"], inspected["HostConfig"]
    labels = config.get("Labels") or {}
    image = str(config["Image"])
    env = env_of(config.get("Env") or ())
    words = launcher_words([*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())])
    _check(name, image, labels, host, found=words is not None or TGI_NAME in image)
    given = told(expanded(config.get("Cmd") or () if words is None else words, env), env)
    own = {key: value for key, value in env.items() if image_env.get(key) != value}
    inner = given.number("port") or DEFAULT_PORT
    return Stock(
        name=name,
        image=image,
        version=_version(image, labels),
        running=bool(inspected["State"].get("Running")),
        told=given,
        env=env,
        own_env=own,
        gpus=_gpus(host, env, own),
        mounts=tuple(_mounts(inspected.get("Mounts") or ())),
        published=_published(inspected, inner),
        address=_address(inspected, inner),
        shm_bytes=int(host.get("ShmSize") or DEFAULT_SHM_BYTES),
        memory_bytes=int(host.get("Memory") or 0),
        restart=_restart(host),
        compose=str(labels.get("com.docker.compose.project", "")),
    )


def runs_tgi(image: str, command: str) -> bool:
    """Whether a line of `docker ps` looks like TGI."""
    return any(word in image or word in command for word in (TGI_NAME, LAUNCHER, ENTRYPOINT))


def env_of(listed: Sequence[str]) -> dict[str, str]:
    """`NAME=value` each; a name alone has no value and is left out."""
    pairs = (entry.partition("=") for entry in listed)
    return {name: value for name, equals, value in pairs if equals}


def launcher_words(command: Sequence[str]) -> tuple[str, ...] | None:
    """The launcher's arguments in a container's whole command; None where no launcher stands in it.

    A shell's line (`sh -c "text-generation-launcher --model-id x"`) is taken apart, up to its end.
    """
    words: list[str] = []
    for word in command:
        words += _taken_apart(word) if LAUNCHER in word and any(map(str.isspace, word)) else [word]
    for at, word in enumerate(words):
        if _name(word) in (LAUNCHER, ENTRYPOINT):
            rest = words[at + 1 :]
            if _name(word) == ENTRYPOINT and rest and _name(rest[0]) == LAUNCHER:
                rest = rest[1:]
            end = next((index for index, one in enumerate(rest) if one in _ENDS), len(rest))
            return tuple(rest[:end])
    return None


def expanded(words: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """With the variables that a shell would put in; not those that hold secrets."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return match[0] if names_secret(name) and not name.startswith("MAX_") else env.get(name, "")

    return tuple(_VARIABLE.sub(value, word) for word in words)


def _name(command: str) -> str:
    return command.rpartition("/")[2]


def _taken_apart(line: str) -> list[str]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    reader.commenters = ""
    try:
        return list(reader)
    except ValueError:
        raise ConfigError(f"The container's command has a {LAUNCHER} whose quotes do not close.") from None


def _check(name: str, image: str, labels: Mapping[str, str], host: Mapping[str, Any], *, found: bool) -> None:
    if deployment := labels.get("tgi-orchestrator.deployment"):
        raise ConfigError(f"The container {name!r} is a shard of the deployment {deployment!r} already.")
    if not found:
        raise ConfigError(
            f"The container {name!r} ({image}) does not run TGI: there is no {LAUNCHER} in its command."
        )
    build = next((word for word in OTHER_BUILDS if word in image.rpartition("/")[2].lower()), "")
    devices = [str(device.get("PathOnHost", "")) for device in host.get("Devices") or ()]
    if not build and any(path.startswith(("/dev/kfd", "/dev/neuron", "/dev/accel")) for path in devices):
        build = "another accelerator"
    if build:
        raise ConfigError(
            f"The container {name!r} runs TGI for {build} ({image}): shards need NVIDIA's GPUs, or none."
        )


def _version(image: str, labels: Mapping[str, str]) -> str:
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    found = _VERSION.search(tag) or _VERSION.search(labels.get("org.opencontainers.image.version") or "")
    return found[0] if found else ""


def _restart(host: Mapping[str, Any]) -> str:
    policy = str((host.get("RestartPolicy") or {}).get("Name") or "")
    return "" if policy == "no" else policy


def _mounts(listed: Sequence[Mapping[str, Any]]) -> list[Mount]:
    return [
        Mount(str(each["Destination"]), str(each.get("Source", "")), str(each.get("Name") or ""))
        for each in listed
        if each.get("Type") in ("bind", "volume")
    ]


# --- GPUs ---------------------------------------------------------------------------------------


def _gpus(host: Mapping[str, Any], env: Mapping[str, str], own: Mapping[str, str]) -> Gpus:
    """By device requests; else by NVIDIA's variable, where its runtime or the user set it."""
    for request in host.get("DeviceRequests") or ():
        named = tuple(map(str, request.get("DeviceIDs") or ()))
        if named:
            return _named(named)
        if request.get("Count"):
            return Gpus(count=int(request["Count"]))
    visible = env.get("NVIDIA_VISIBLE_DEVICES", "")
    if host.get("Runtime") == "nvidia" or "NVIDIA_VISIBLE_DEVICES" in own:
        return _named(tuple(filter(None, visible.split(","))))
    return Gpus()


def _named(named: tuple[str, ...]) -> Gpus:
    plain = tuple(name.strip() for name in named)
    if any(name.removeprefix(CDI) == "all" for name in plain):
        return Gpus(count=ALL)
    return Gpus(tuple(name for name in plain if name not in ("none", "void")))


# --- the port -----------------------------------------------------------------------------------


def _published(inspected: Mapping[str, Any], inner: int) -> Published | None:
    """Of a running container where it is, of a stopped one where it was asked to be."""
    host = inspected["HostConfig"]
    if host.get("NetworkMode") == "host":
        return Published("", inner)
    listed = (inspected.get("NetworkSettings") or {}).get("Ports") or {}
    for ports in (listed, host.get("PortBindings") or {}):
        for binding in ports.get(f"{inner}/tcp") or ():
            if str(binding.get("HostPort") or "0") not in ("", "0"):
                where = str(binding.get("HostIp") or "")
                return Published("" if where in ("0.0.0.0", "::") else where, int(binding["HostPort"]))
    return None


def _address(inspected: Mapping[str, Any], inner: int) -> str:
    networks = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    found = next((str(net["IPAddress"]) for net in networks.values() if net.get("IPAddress")), "")
    return f"{found}:{inner}" if found else ""
