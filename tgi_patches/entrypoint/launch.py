"""What a container starts: TGI's launcher and a sidecar, each with its environment.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from tgi_patches.contract import (
    EPOCH_VARIABLE,
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    SPEC_VARIABLE,
    ContractError,
    Role,
    ShardSpec,
)
from tgi_patches.entrypoint.flags import FLAGS, split, value_of
from tgi_patches.entrypoint.profile import TGI_DTYPES, role_defaults, spec_defaults

TGI_PORT = "3000"
_SECRETS = (KEY_VARIABLE, KEY_FILE_VARIABLE)
_FOR_SIDECAR = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")


@dataclass(frozen=True, slots=True)
class Places:
    """Where things stand in this image."""

    overlay: str
    """The folder that holds the package `tgi_patches`, and what it needs that TGI has not."""
    venv: str = ""
    """TGI's Python environment; empty where its commands are on PATH already."""

    @property
    def commands(self) -> str:
        """Has our `text-generation-server`."""
        return f"{self.overlay}/tgi_patches/entrypoint/bin"


@dataclass(frozen=True, slots=True)
class Launch:
    """A decision: what to run."""

    arguments: tuple[str, ...]
    """For `text-generation-launcher`."""
    env: Mapping[str, str]
    spec: ShardSpec | None = None
    """None where no overlay is laid on and no sidecar runs."""
    sidecar_env: Mapping[str, str] | None = None


def launch_of(arguments: Sequence[str], env: Mapping[str, str], epoch: int, places: Places) -> Launch:
    """Raises ContractError, one sentence, for what cannot work.

    Without our flag and without a spec it is TGI as it comes; with a flag alone, TGI with that phase's
    profile; with a spec, a shard whose records flow.
    """
    flag, rest = split(arguments)
    if SPEC_VARIABLE not in env:
        defaults = {} if flag is None else role_defaults(flag, None, rest, env)
        return Launch(rest, activated({**defaults, **env}, places.venv))
    spec = completed_spec(env[SPEC_VARIABLE], flag, rest, env)
    user = {**env, **spec.tgi_env}
    check(spec, rest, user)
    mine = {**spec.to_env(), EPOCH_VARIABLE: str(epoch)}
    shard = {**spec_defaults(spec, rest, user), **user, **_orders(spec, user), **mine}
    sidecar = {**sidecar_env(env), "PORT": router_port(spec, rest, user), **mine}
    return Launch(rest, with_overlay(shard, places), spec, sidecar)


def completed_spec(
    text: str, flag: Role | None, arguments: Sequence[str], env: Mapping[str, str]
) -> ShardSpec:
    """The spec; where it has no role or model, with that of our flag and of the launcher's own settings."""
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise ContractError(f"The variable {SPEC_VARIABLE} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ContractError(f"The variable {SPEC_VARIABLE} must hold a JSON object.")
    role = raw.get("role", flag)
    if role is None:
        raise ContractError(f"Name the shard's role: in the spec, or by {' or '.join(FLAGS)}.")
    if flag is not None and role != flag:
        raise ContractError(f"The flag says {flag} and the spec says {role}: they must agree.")
    model = raw.get("model") or value_of(arguments, "--model-id") or env.get("MODEL_ID")
    if not model:
        raise ContractError("Name the model: in the spec, or by --model-id or MODEL_ID.")
    return ShardSpec.from_dict({"model_name": model, **raw, "model": model, "role": role})


def router_port(spec: ShardSpec, arguments: Sequence[str], user: Mapping[str, str]) -> str:
    """At which TGI's router will listen."""
    if spec.port:
        return str(spec.port)
    return value_of(arguments, "--port") or user.get("PORT") or TGI_PORT


def sidecar_env(env: Mapping[str, str]) -> dict[str, str]:
    """The deployment's key and little else: no token for the hub, nothing that steers TGI or its Python."""
    ours = {name: value for name, value in env.items() if name.startswith("ORCHESTRATOR_")}
    return ours | {name: env[name] for name in _FOR_SIDECAR if name in env}


def activated(env: Mapping[str, str], venv: str, commands: str = "") -> dict[str, str]:
    """As TGI's own entrypoint activates its environment; `commands` then come before it."""
    path = (commands, f"{venv}/bin" if venv else "", env.get("PATH", ""))
    made = {**env, "PATH": ":".join(filter(None, path))}
    if venv:
        made["VIRTUAL_ENV"] = venv
        made.pop("PYTHONHOME", None)
    return made


def with_overlay(env: Mapping[str, str], places: Places) -> dict[str, str]:
    """`env` with our `text-generation-server` before TGI's, and the overlay where Python finds it.

    Every folder on PYTHONPATH comes before TGI's own packages, the last one too.  So the overlay's must
    not hold a name that TGI has: it has `tgi_patches`, and xxhash only where TGI came without it (see the
    Dockerfile).  It stands last, behind what a user put there.
    """
    path = (env.get("PYTHONPATH", ""), places.overlay)
    made = activated(env, places.venv, places.commands) | {"PYTHONPATH": ":".join(filter(None, path))}
    # The sidecar alone talks to other hosts: the key is none of the launcher's and its servers' business.
    return {name: value for name, value in made.items() if name not in _SECRETS}


def check(spec: ShardSpec, arguments: Sequence[str], user: Mapping[str, str]) -> None:
    """Raises ContractError for what would leave the shard without records, or out of reach."""
    if spec.role != Role.MIXED and user.get("ATTENTION") == "paged":
        raise ContractError(
            f"A {spec.role} shard cannot use ATTENTION=paged: its prefill ignores KV that is already "
            "there; use flashinfer or flashdecoding."
        )
    if not spec.arena_dir:
        raise ContractError("The spec needs an arena_dir: a folder on a tmpfs that a host's shards share.")
    if not spec.sidecar_port or spec.sidecar_port == spec.port:
        raise ContractError("The spec must give the sidecar a port of its own (sidecar_port).")
    if spec.role == Role.PREFILL and not spec.arena_bytes:
        raise ContractError("A prefill shard needs a ring for its records (arena_bytes).")
    if spec.dtype not in (*TGI_DTYPES, "float32"):
        raise ContractError(f"TGI runs in {', '.join(TGI_DTYPES)} or float32, not in {spec.dtype}.")
    ranks = value_of(arguments, "--num-shard") or user.get("NUM_SHARD")
    _agree("--num-shard", ranks, "tensor_parallel", spec.tensor_parallel)
    if spec.port:
        _agree("--port", value_of(arguments, "--port"), "port", spec.port)


def _agree(flag: str, told: str | None, key: str, ordered: int) -> None:
    if told is not None and told != str(ordered):
        raise ContractError(f"The launcher gets {flag} {told} and the spec says {key} {ordered}: choose one.")


def _orders(spec: ShardSpec, user: Mapping[str, str]) -> dict[str, str]:
    """What no default of the image may stand in the way of.

    TGI's image sets PORT=80, and Docker sets HOSTNAME to a name, in place of which TGI listens everywhere.
    """
    port = {"PORT": str(spec.port)} if spec.port else {}
    return port if _is_address(user.get("HOSTNAME", "")) else port | {"HOSTNAME": spec.host}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
