"""What of a stock TGI's flags and variables every shard gets as it is, and what stays unwritten.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.launcher_flags import FLAGS, Becomes, as_arguments, variable_of
from orchestrator.core.secret_names import names_secret, repeats_secret, secret_values
from orchestrator.core.stock import Mount, Stock, joined

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "HF_API_TOKEN")
TGI_HOME = "/data"
"""HF_HOME of TGI's image; `model.cache` is mounted there."""
BY_ROLE = frozenset({"PREFIX_CACHING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"})
"""Variables that each role's profile sets."""

_OF_THE_IMAGE = ("NVIDIA_", "NV_", "CUDA_", "CONDA_", "UV_", "ORCHESTRATOR_", "DEBIAN_")
_OF_THE_SYSTEM = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "HOME", "HOSTNAME", "PWD", "SHLVL", "TERM"),
        *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"),
        *("HF_HOME", "HF_HUB_CACHE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    }
)


@dataclass(frozen=True, slots=True)
class Carried:
    arguments: tuple[str, ...]
    """What all shards must agree on, as flags, however it was said."""
    env: Mapping[str, str]
    """The user's own variables."""
    hidden_flags: tuple[str, ...]
    hidden_env: tuple[str, ...]
    """Names of what is left out because it is, looks like or repeats a secret."""
    secrets: frozenset[str]
    """Values that may appear nowhere."""


def carried(stock: Stock) -> Carried:
    secrets = secret_values(stock.env, _secret_arguments(stock))
    shared = stock.told.those(Becomes.SHARED)
    if stock.told.one("dtype") == "float16":
        shared = {"dtype": ("float16",), **shared}
    shared |= _hub_argument(stock)
    hidden_flags = tuple(name for name, values in shared.items() if _hidden(values, secrets))
    own = {name: value for name, value in sorted(stock.own_env.items()) if not _skipped(name)}
    hidden_env = tuple(
        name for name, value in own.items() if names_secret(name) or repeats_secret(value, secrets)
    )
    return Carried(
        arguments=tuple(as_arguments({n: v for n, v in shared.items() if n not in hidden_flags})),
        env={n: v for n, v in own.items() if n not in hidden_env and (n, v) != ("ATTENTION", "paged")},
        hidden_flags=hidden_flags,
        hidden_env=hidden_env,
        secrets=secrets,
    )


def hub_folder(stock: Stock) -> str:
    """Where the container looks for files of the hub."""
    named = stock.told.one("huggingface-hub-cache") or stock.env.get("HF_HUB_CACHE")
    return named or f"{stock.env.get('HF_HOME', TGI_HOME)}/hub"


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The innermost one that holds `path`."""
    holding = [mount for mount in mounts if mount.below(path) is not None]
    return max(holding, key=lambda mount: len(mount.target), default=None)


def _hub_argument(stock: Stock) -> dict[str, tuple[str, ...]]:
    """Where its mount, put to TGI's own folder, does not have them where TGI looks by itself."""
    folder = hub_folder(stock)
    mount = mount_of(folder, stock.mounts)
    if mount is None or mount.volume:
        return {}
    there = joined(TGI_HOME, mount.below(folder) or "")
    return {} if there == f"{TGI_HOME}/hub" else {"huggingface-hub-cache": (there,)}


def _hidden(values: Sequence[str], secrets: frozenset[str]) -> bool:
    return any(repeats_secret(value, secrets) for value in values)


def _secret_arguments(stock: Stock) -> list[str]:
    named = (value for name in ("api-key", "ngrok-authtoken") for value in stock.told.values.get(name, ()))
    return [*named, *stock.told.hidden]


def _skipped(name: str) -> bool:
    """The image's, the launcher's, or nothing of the user's."""
    return (
        name in {variable_of(flag) for flag in FLAGS}
        or name in _OF_THE_SYSTEM
        or name in BY_ROLE
        or name in HUB_TOKENS
        or name.startswith(_OF_THE_IMAGE)
    )
