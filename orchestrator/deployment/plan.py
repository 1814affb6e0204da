"""From settings and a model to launch orders: limits, cores and ring sizes.  Decides, does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Loaded
from orchestrator.core.kv_bytes import ModelShape, bytes_per_token, ring_bytes, shape_of
from orchestrator.embedded.weights import ResolvedModel
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings
from tgi_patches.contract import Role, ShardSpec

DECODE_PREFILL_TOKENS = 1024
"""A decode shard's prefill budget: an imported prompt costs one token, a miss is cut in chunks."""

MIN_TOTAL_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first process starts."""

    model: ResolvedModel
    dtype: str
    max_input_tokens: int
    max_total_tokens: int
    arena_dir: Path
    specs: tuple[ShardSpec, ...]

    @property
    def arena_bytes(self) -> int:
        """Of all rings together."""
        return sum(spec.arena_bytes for spec in self.specs)


def make_plan(
    loaded: Loaded, model: ResolvedModel, config: Mapping[str, Any], dtype: str, cores: Sequence[int]
) -> Plan:
    """`config` is the model's config.json, `cores` are those that we may use.

    ConfigError for limits or cores that cannot work.
    """
    settings = loaded.settings
    shape = shape_of(config)
    max_input, max_total = token_limits(loaded, shape)
    ring = settings.arena.bytes or ring_bytes(bytes_per_token(shape, dtype), max_input)
    directory = settings.arena.directory()
    specs = tuple(
        ShardSpec(
            deployment=settings.deployment,
            shard=f"{role}-{index}",
            role=role,
            model=str(model.path),
            model_name=model.name,
            revision=model.revision,
            dtype=dtype,
            cpus=cpus,
            arena_dir=str(directory),
            arena_bytes=ring if role is Role.PREFILL else 0,
            record_ttl_s=settings.arena.record_ttl_s,
            max_input_tokens=max_input,
            max_total_tokens=max_total,
            max_batch_prefill_tokens=_prefill_budget(role, settings, max_input),
            max_concurrent_requests=settings.limits.max_concurrent_requests,
            tgi_python=str(settings.tgi.python or ""),
            tgi_env=settings.tgi.env,
        )
        for role, index, cpus in _places(settings, cores)
    )
    return Plan(model, dtype, max_input, max_total, directory, specs)


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
            "lower limits.max_input_tokens or arena.bytes, or name another tmpfs in arena.dir."
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def _places(settings: Settings, cores: Sequence[int]) -> Iterator[tuple[Role, int, tuple[int, ...]]]:
    """(role, index, cores) of each shard; without a wish one core each, in turn."""
    turn = 0
    for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
        section = getattr(settings.shards, role.value)
        for index in range(section.count):
            if section.cpus:
                wanted = tuple(section.cpus[index])
                _check_cores(f"shards.{role}.cpus", wanted, cores)
                yield role, index, wanted
            else:
                yield role, index, (cores[turn % len(cores)],)
                turn += 1


def _check_cores(key: str, wanted: Sequence[int], cores: Sequence[int]) -> None:
    if missing := sorted(set(wanted) - set(cores)):
        raise ConfigError(f"{key} names core {missing[0]}, which this process may not use.")


def _prefill_budget(role: Role, settings: Settings, max_input_tokens: int) -> int:
    budget = max(settings.limits.max_batch_prefill_tokens, max_input_tokens)
    return min(budget, DECODE_PREFILL_TOKENS) if role is Role.DECODE else budget
