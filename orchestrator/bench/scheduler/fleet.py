"""The simulated shards: what the policy is told of each, and the cost model that both go by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.bench.scheduler.engine import Build
from orchestrator.core.cost import Costs, DecodeCost, PrefillCost, RelayCost
from orchestrator.core.ticket import ShardView
from orchestrator.errors import ConfigError
from tgi_patches.contract import Fingerprint, Limits, Role

T = TypeVar("T")
MS = 1e-3
COSTS = Costs(
    prefill=PrefillCost(fixed_s=8 * MS, per_token_s=0.09 * MS, per_square_s=1.2e-6 * MS),
    decode=DecodeCost(fixed_s=12 * MS, per_context_s=8e-5 * MS, per_sequence_s=0.05 * MS),
    relay=RelayCost(latency_s=2 * MS, bytes_per_s=12e9),
)
"""In the spirit of Llama-3.1-8B in 16 bits on one A100: half of its FLOPS in prefill, 1.6 TB/s in decode."""
BYTES_PER_TOKEN = 128 * 1024
"""Of the same model."""
KV_TOKENS = 400_000
"""What 50 GB hold of them."""
SLOTS = 256
PREFILL_BUDGET_TOKENS = 4096
"""TGI's default; a longer prompt goes alone."""
DECODE_BUDGET_TOKENS = 1024
"""As `up` launches decode shards, with chunks: an import costs one token, a miss is cut."""
_LIMITS = Limits(
    max_input_tokens=16_384, max_total_tokens=32_768, max_concurrent_requests=4096, payload_bytes=2_000_000
)
_FINGERPRINT = Fingerprint("bench", "1", "t", "float16", "float16", 32, 8, 128)


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many shards of each role, and what their phases take."""

    prefill: int
    decode: int
    costs: Costs = COSTS
    prefill_budget_tokens: int = PREFILL_BUDGET_TOKENS
    told: bool = True
    """The policy knows the costs, as it does once they were measured."""

    def __str__(self) -> str:
        return f"{self.prefill}+{self.decode}"

    @property
    def relay(self) -> RelayCost:
        return _known(self.costs.relay)

    def build(self, role: Role) -> Build:
        """Of this role's engines."""
        prefill, decode = _known(self.costs.prefill), _known(self.costs.decode)
        if role is Role.PREFILL:
            return Build(prefill, decode, self.prefill_budget_tokens, SLOTS)
        return Build(prefill, decode, DECODE_BUDGET_TOKENS, SLOTS, chunked=True)

    def views(self) -> Iterator[ShardView]:
        """Ready and idle; told costs are the very ones that the engines have."""
        for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            for number in range(count):
                yield view_of(f"{role}-{number}", role, self.costs if self.told else None)


def view_of(shard: str, role: Role, costs: Costs | None = None, epoch: int = 1) -> ShardView:
    """One shard of a fleet, on the host that all of them share."""
    return ShardView(
        shard=shard,
        role=role,
        epoch=epoch,
        url=f"http://{shard}",
        state="ready",
        fingerprint=_FINGERPRINT,
        limits=_LIMITS,
        kv_tokens=KV_TOKENS,
        slots=SLOTS,
        ring_bytes=1 << 40,
        record_limit_bytes=1 << 38,
        bytes_per_token=BYTES_PER_TOKEN,
        arena_id="bench",
        costs=costs,
    )


def _known(cost: T | None) -> T:
    assert cost is not None, "a fleet without a cost model"
    return cost


# --- a running deployment's model ---------------------------------------------------------------


def read_costs(path: Path) -> Costs:
    """Of a saved cost file: the first prefill, decode and relay model in it, whatever shard they are of.

    Without a relay the default's is taken.  ConfigError for a file that has no such models.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"The cost file {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"The cost file {path} is no JSON.") from None
    found = {
        name: _first(raw, name, kind)
        for name, kind in (("prefill", PrefillCost), ("decode", DecodeCost), ("relay", RelayCost))
    }
    if found["prefill"] is None or found["decode"] is None:
        raise ConfigError(f"The cost file {path} has no model of both prefill and decode.")
    known = {name: cost for name, cost in found.items() if cost is not None}
    return replace(COSTS, **known)


def _first(raw: Any, name: str, kind: type[Any]) -> Any:
    """The first object under this name, at any depth, that has all fields of a cost."""
    children = raw.values() if isinstance(raw, Mapping) else raw if isinstance(raw, list) else ()
    here = raw.get(name) if isinstance(raw, Mapping) else None
    if isinstance(here, Mapping):
        fields = {key: here[key] for key in kind.__slots__ if isinstance(here.get(key), int | float)}
        if len(fields) == len(kind.__slots__):
            return kind(**fields)
    return next((cost for child in children if (cost := _first(child, name, kind)) is not None), None)
