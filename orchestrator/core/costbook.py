"""What every shard's phases take, learned while requests run.

Known by profile too (model, precision, engine), so that a relaunched or second shard begins with what others
have shown.  Nothing that is negative, not finite or absurd gets in, from a file either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from orchestrator.core.cost import KINDS, Costs
from orchestrator.core.learning import ShardFit
from orchestrator.core.observing import Observer
from orchestrator.core.ticket import Completion, Grant, Relayed, ShardView, Ticket

VERSION = 1
NOTHING = Costs()
PROFILES_MOST = 256
ENOUGH_SAMPLES = 32
"""Of one shard, before what it has learned is what its profile is known by."""
SETTLED_SAMPLES = 64
FIT_EVERY_S = 5.0
"""Of one shard at most, once it is settled: with many busy shards fits would take a tenth of a core."""


def profile(view: ShardView) -> str:
    """Equal for shards that may be expected to be equally fast; a role makes no difference."""
    print_ = view.fingerprint
    return "|".join(
        (
            view.engine,
            print_.model,
            print_.revision,
            print_.dtype,
            print_.kv_dtype,
            print_.quantization,
            print_.attention,
            f"tp{print_.tensor_parallel}",
        )
    )


class _Known:
    """One shard's fit, of one incarnation."""

    __slots__ = ("begun", "costs", "epoch", "fit", "fit_again_s", "fitted", "profile", "told")

    def __init__(self, view: ShardView, prior: Costs | None) -> None:
        self.epoch = view.epoch
        self.profile = profile(view)
        self.fit = ShardFit(prior)
        self.costs: Costs | None = None if prior is None or prior == Costs() else prior
        self.begun: tuple[Costs | None, Costs, Costs] | None = None
        """`costs`, what every shard begins with, and the one completed by the other."""
        self.fitted: Costs | None = None
        """By `fit`, the last time."""
        self.fit_again_s = float("-inf")
        self.told = True
        """No sample came since `costs` was asked for."""


class CostBook:
    """Costs by shard.  Told of events and asked by one task; no I/O and no clock."""

    def __init__(self, profiles: Mapping[str, Costs] | None = None) -> None:
        self._profiles = dict(profiles or {})
        self._shards: dict[str, _Known] = {}
        self._observer = Observer()
        self._start = Costs()
        self._now_s = 0.0
        """Of the latest event."""
        self.changes = 0
        """Counts what a file would have to be written anew for."""

    def begin_with(self, start: Costs) -> Self:
        """What every shard is taken to cost until it, or one of its kind, has shown something else.

        It is no knowledge of ours: never kept, and nothing is fitted to it.
        """
        self._start = start
        return self

    # --- events ---------------------------------------------------------------------------------

    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None:
        self._observer.granted(ticket, grant, now_s)

    def relayed(self, relayed: Relayed, now_s: float) -> None:
        self._now_s = now_s
        self._observer.relayed(relayed, now_s)
        self._learn()

    def ended(self, completion: Completion, now_s: float) -> None:
        self._now_s = now_s
        self._observer.ended(completion, now_s)
        self._learn()

    def lost(self, shard: str, epoch: int) -> None:
        """An incarnation is gone; what was learned of it stays for the next."""
        self._observer.lost(shard, epoch)

    def calibrated(self, view: ShardView, costs: Costs) -> None:
        """What a few requests alone have shown; earlier samples of this incarnation are dropped."""
        known = self._shards[view.shard] = _Known(view, _merged(costs, self._prior(view)))
        self._keep(known)

    # --- questions ------------------------------------------------------------------------------

    def of(self, view: ShardView) -> Costs | None:
        """What is known of a shard; None for nothing at all.  Fits anew at most every few samples."""
        known = self._shards.get(view.shard)
        if known is None or known.epoch != view.epoch or self._shown_since(known):
            known = self._shards[view.shard] = _Known(view, self._prior(view))
        if not known.told and self._now_s >= known.fit_again_s:
            self._fit(known)
        return known.costs if self._start == NOTHING else self._begun(known)

    def unknown(self, view: ShardView) -> bool:
        """Nobody has measured prefill or decode of a shard like this one."""
        costs = self.of(view)
        return costs is None or costs.prefill is None or costs.decode is None

    def batches(self, shard: str) -> tuple[float, float] | None:
        """Mean requests and tokens of the recent prefill batches of a shard; None before the first."""
        known = self._shards.get(shard)
        return None if known is None else self._observer.batches(shard, known.epoch)

    def to_dict(self) -> dict[str, Any]:
        profiles = {name: dataclasses.asdict(costs) for name, costs in self._profiles.items()}
        return {"version": VERSION, "profiles": profiles}

    @classmethod
    def from_dict(cls, raw: Any) -> CostBook:
        """Raises ValueError for anything but what `to_dict` gives, numbers that cannot be true included."""
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise ValueError(f"It is no cost book of version {VERSION}.")
        profiles = raw.get("profiles")
        if not isinstance(profiles, dict) or len(profiles) > PROFILES_MOST:
            raise ValueError("Its profiles cannot be read.")
        return cls({str(name): _costs(one) for name, one in profiles.items()})

    # --- within ---------------------------------------------------------------------------------

    def _fit(self, known: _Known) -> None:
        known.told = True
        costs = known.fit.costs()
        if costs is known.fitted or costs == Costs():
            return
        known.fitted = costs
        # What it does not do itself, others of its kind may have shown.
        known.costs = _merged(costs, self._profiles.get(known.profile))
        if known.fit.seen >= ENOUGH_SAMPLES:
            self._keep(known)
        if known.fit.seen >= SETTLED_SAMPLES:
            known.fit_again_s = self._now_s + FIT_EVERY_S

    def _begun(self, known: _Known) -> Costs:
        """What is known of a shard, completed; the same object as long as nothing changes."""
        before = known.begun
        if before is None or before[0] is not known.costs or before[1] is not self._start:
            before = known.costs, self._start, _merged(known.costs or NOTHING, self._start)
            known.begun = before
        return before[2]

    def _learn(self) -> None:
        for shard, epoch, sample in self._observer.take():
            known = self._shards.get(shard)
            if known is not None and known.epoch == epoch and known.fit.observe(sample):
                known.told = False

    def _shown_since(self, known: _Known) -> bool:
        """Nothing is known of this one, and another one of its kind has been measured meanwhile."""
        return known.costs is None and not known.fit.seen and known.profile in self._profiles

    def _prior(self, view: ShardView) -> Costs | None:
        """The shard's own past, if it is of the same kind still; else what its profile is known by."""
        before = self._shards.get(view.shard)
        kept = self._profiles.get(profile(view))
        if before is None or before.profile != profile(view) or before.costs is None:
            return kept
        return _merged(before.costs, kept)

    def _keep(self, known: _Known) -> None:
        if known.costs is None:
            return
        merged = _merged(known.costs, self._profiles.pop(known.profile, None))
        self._profiles[known.profile] = merged  # the latest at the end
        if len(self._profiles) > PROFILES_MOST:
            del self._profiles[next(iter(self._profiles))]
        self.changes += 1


def _merged(costs: Costs, others: Costs | None) -> Costs:
    """`costs`, and of `others` what that does not know."""
    if others is None:
        return costs
    return Costs(
        costs.prefill or others.prefill,
        costs.decode or others.decode,
        costs.relay or others.relay,
        costs.pull or others.pull,
    )


def _costs(raw: Any) -> Costs:
    if not isinstance(raw, dict):
        raise ValueError("A profile is no JSON object.")
    parts: dict[str, Any] = {}
    for name, kind in KINDS.items():
        part = raw.get(name)
        if part is None:
            continue
        fields = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(part, dict) or part.keys() != fields:
            raise ValueError(f"The {name} part of a profile cannot be read.")
        parts[name] = kind(**part)
    return Costs(**parts)
