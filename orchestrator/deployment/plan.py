"""From settings and a model to launch orders: limits, cores and ring sizes.  Decides, does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import Loaded
from orchestrator.core.kv_bytes import ModelShape, bytes_per_token, ring_bytes, shape_of
from orchestrator.core.topology import Topology
from orchestrator.deployment.policy import hot_prompts_on
from orchestrator.embedded.weights import ResolvedModel
from orchestrator.errors import ConfigError
from orchestrator.settings import RoleSection, Settings
from orchestrator.shards.docker.container import Bind
from tgi_patches.contract import Role, ShardSpec

DECODE_PREFILL_TOKENS = 1024
"""A decode shard's prefill budget: an imported prompt costs one token, a miss is cut in chunks."""

PINNED_SHARE = 8
"""A pinned region has this part of its ring's size: few records are read so often."""

MIN_TOTAL_TOKENS = 2
_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


@dataclass(frozen=True, slots=True)
class Containers:
    """What the containers of a deployment have in common."""

    network: str
    binds: tuple[Bind, ...]
    user: str = ""
    """`uid:gid`; empty for the image's own."""
    arena_bytes: int = 0
    """Of all arenas together, when none is rolled."""
    topology: Topology | None = None
    owner: str = ""
    """The state folder that they are launched from."""
    notes: tuple[str, ...] = ()
    """What the user should know of it, in sentences."""

    @property
    def gpus_by_index(self) -> dict[str, str]:
        """UUIDs."""
        return self.topology.uuids_by_index if self.topology else {}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first process starts."""

    model: ResolvedModel
    dtype: str
    max_input_tokens: int
    max_total_tokens: int
    arena_dir: Path
    specs: tuple[ShardSpec, ...]
    urls: Mapping[str, str] = field(default_factory=dict)
    """By name, of the shards that somebody else starts and keeps."""
    containers: Containers | None = None
    """None where shards are processes."""

    @property
    def arena_bytes(self) -> int:
        """Of all rings and pinned regions together, those with copies from other hosts included."""
        return sum(spec.arena_bytes + spec.pinned_bytes + spec.pulled_bytes for spec in self.specs)

    @property
    def launched(self) -> tuple[ShardSpec, ...]:
        """The orders that are carried out here."""
        return tuple(spec for spec in self.specs if spec.shard not in self.urls)


def make_plan(
    loaded: Loaded, model: ResolvedModel, config: Mapping[str, Any], dtype: str, cores: Sequence[int]
) -> Plan:
    """`config` is the model's config.json, `cores` are those that we may use.

    ConfigError for limits or cores that cannot work.
    """
    frame = _frame(loaded, model, config, dtype)
    specs = tuple(
        frame.spec(role, f"{role}-{index}", cpus, kept_elsewhere=bool(_urls(frame.settings, role)))
        for role, index, cpus in _places(frame.settings, cores)
    )
    urls = {
        f"{role}-{index}": url for role in _ROLES for index, url in enumerate(_urls(frame.settings, role))
    }
    return frame.plan(_each_its_port(specs), urls)


def shard_plan(
    loaded: Loaded,
    model: ResolvedModel,
    config: Mapping[str, Any],
    dtype: str,
    cores: Sequence[int],
    spec: WantedShard,
) -> Plan:
    """The same for one shard alone on its host, as `up` would launch it beside others."""
    frame = _frame(loaded, model, config, dtype)
    _check_cores("--cpus", spec.cpus, cores)
    ranks = getattr(frame.settings.shards, spec.role.value).tp
    made = frame.spec(spec.role, spec.name, spec.cpus or tuple(cores[:ranks]), alone=True)
    made = dataclasses.replace(made, host=spec.host, port=spec.port)
    return frame.plan((made,), {})


@dataclass(frozen=True, slots=True)
class WantedShard:
    """What the flags of `shard` say."""

    role: Role
    name: str
    host: str
    port: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all shards of a deployment have in common."""

    settings: Settings
    model: ResolvedModel
    dtype: str
    max_input_tokens: int
    max_total_tokens: int
    ring_bytes: int

    def plan(self, specs: tuple[ShardSpec, ...], urls: Mapping[str, str]) -> Plan:
        directory = self.settings.arena.directory()
        return Plan(
            self.model, self.dtype, self.max_input_tokens, self.max_total_tokens, directory, specs, urls
        )

    def spec(
        self,
        role: Role,
        name: str,
        cpus: tuple[int, ...],
        *,
        kept_elsewhere: bool = False,
        alone: bool = False,
    ) -> ShardSpec:
        """`kept_elsewhere`: not launched from here; `alone`: its partners are on other hosts."""
        settings, arena = self.settings, self.settings.arena
        exports = role is Role.PREFILL and not kept_elsewhere
        pulls = role is Role.DECODE and not kept_elsewhere and (alone or bool(settings.shards.prefill.urls))
        return ShardSpec(
            deployment=settings.deployment,
            shard=name,
            role=role,
            model=str(self.model.path),
            model_name=self.model.name,
            revision=self.model.revision,
            dtype=self.dtype,
            cpus=cpus,
            arena_dir=str(arena.directory()),
            arena_bytes=self.ring_bytes if exports else 0,
            record_ttl_s=arena.record_ttl_s,
            max_input_tokens=self.max_input_tokens,
            max_total_tokens=self.max_total_tokens,
            max_batch_prefill_tokens=_prefill_budget(role, settings, self.max_input_tokens),
            max_concurrent_requests=settings.limits.max_concurrent_requests,
            tgi_python=str(settings.tgi.python or ""),
            tgi_env=settings.tgi.env,
            tensor_parallel=getattr(settings.shards, role.value).tp,
            pull_listen=arena.pull_listen if exports else "",
            pulled_bytes=(arena.pulled_bytes or self.ring_bytes) if pulls else 0,
            pinned_bytes=self._pinned_bytes(alone=alone) if exports else 0,
        )

    def _pinned_bytes(self, *, alone: bool) -> int:
        """Of a shard that exports; `alone`: how many decode shards there are elsewhere is not known."""
        if not (hot_prompts_on(self.settings) or (alone and self.settings.routing.hot_prompts == "auto")):
            return 0
        return self.settings.arena.pinned_bytes or self.ring_bytes // PINNED_SHARE


def _frame(loaded: Loaded, model: ResolvedModel, config: Mapping[str, Any], dtype: str) -> _Frame:
    settings, shape = loaded.settings, shape_of(config)
    _check_ranks(settings, shape, dtype)
    max_input, max_total = token_limits(loaded, shape)
    ring = settings.arena.bytes or ring_bytes(bytes_per_token(shape, dtype), max_input)
    return _Frame(settings, model, dtype, max_input, max_total, ring)


def _each_its_port(specs: Sequence[ShardSpec]) -> tuple[ShardSpec, ...]:
    """Where several shards offer records at one given port, each further one takes the next."""
    offering = [spec.shard for spec in specs if spec.pull_listen]

    def at_its_port(spec: ShardSpec) -> ShardSpec:
        host, _, port = spec.pull_listen.rpartition(":")
        if not port or port == "0":
            return spec
        return dataclasses.replace(spec, pull_listen=f"{host}:{int(port) + offering.index(spec.shard)}")

    return tuple(map(at_its_port, specs))


def token_limits(loaded: Loaded, shape: ModelShape) -> tuple[int, int]:
    """(max_input_tokens, max_total_tokens): defaults shrink to the model, what the user wrote does not."""
    limits, longest = loaded.settings.limits, shape.max_positions
    total, inputs = limits.max_total_tokens, limits.max_input_tokens
    if longest is not None and total > longest:
        if loaded.origins["limits.max_total_tokens"] != "default":
            raise ConfigError(f"limits.max_total_tokens is {total}, but the model ends at {longest} tokens.")
        total = longest
    if total < MIN_TOTAL_TOKENS:
        raise ConfigError(f"A limit of {total} tokens leaves no room for a prompt and an answer.")
    if inputs >= total:
        if loaded.origins["limits.max_input_tokens"] != "default":
            raise ConfigError(f"limits.max_input_tokens ({inputs}) must be below max_total_tokens ({total}).")
        inputs = total - 1
    return inputs, total


def check_room(needed_bytes: int, free_bytes: int, directory: Path) -> None:
    """ConfigError when the rings do not fit in the tmpfs."""
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"The KV arenas need {_mib(needed_bytes)} MiB and {directory} has {_mib(free_bytes)} MiB free: "
            "lower limits.max_input_tokens, arena.bytes or arena.pinned_bytes, "
            "or name another tmpfs in arena.dir."
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def _urls(settings: Settings, role: Role) -> list[str]:
    section: RoleSection = getattr(settings.shards, role.value)
    return section.urls


def _places(settings: Settings, cores: Sequence[int]) -> Iterator[tuple[Role, int, tuple[int, ...]]]:
    """(role, index, cores) of each shard; without a wish a core for each rank, in turn."""
    turn = 0
    for role in _ROLES:
        section = getattr(settings.shards, role.value)
        for index in range(section.shards):
            if section.urls:
                yield role, index, ()
            elif section.cpus:
                wanted = tuple(section.cpus[index])
                _check_cores(f"shards.{role}.cpus", wanted, cores)
                yield role, index, wanted
            else:
                yield (
                    role,
                    index,
                    tuple(dict.fromkeys(cores[(turn + i) % len(cores)] for i in range(section.tp))),
                )
                turn += section.tp


def _check_ranks(settings: Settings, shape: ModelShape, dtype: str) -> None:
    """ConfigError for a model that cannot be split over the ranks of a shard."""
    for role in _ROLES:
        ranks = getattr(settings.shards, role.value).tp
        if ranks > 1 and dtype == "int8":
            raise ConfigError(f"shards.{role}.tp is {ranks}, but int8 weights cannot be split over ranks.")
        copied = shape.kv_heads == 1 and settings.tgi.python is not None
        if shape.kv_heads % ranks and not copied:
            raise ConfigError(
                f"shards.{role}.tp is {ranks}, but the model's {shape.kv_heads} KV heads "
                f"cannot be split over {ranks} ranks."
            )


def _check_cores(key: str, wanted: Sequence[int], cores: Sequence[int]) -> None:
    if missing := sorted(set(wanted) - set(cores)):
        raise ConfigError(f"{key} names core {missing[0]}, which this process may not use.")


def _prefill_budget(role: Role, settings: Settings, max_input_tokens: int) -> int:
    budget = max(settings.limits.max_batch_prefill_tokens, max_input_tokens)
    return min(budget, DECODE_PREFILL_TOKENS) if role is Role.DECODE else budget
