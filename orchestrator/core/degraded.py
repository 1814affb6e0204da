"""The ladder of degradation: what each level takes away, and which level a deployment needs now.

normal -> reduced -> tight -> minimal -> shedding: up as soon as it is needed, straight to the level that is;
down one level at a time, each after a calm while.  Time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.decision import Mode
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import ShardView
from tgi_patches.contract import Role


@dataclass(frozen=True, slots=True)
class Level:
    """What holds on one level.  Prefill shards decode on any of them, where no decode shard is ready."""

    name: str
    output_cap: int | None = None
    """Most tokens of an answer."""
    shed_below: int | None = None
    """Requests of a lower priority are refused."""


LEVELS = (
    Level("normal"),
    Level("reduced", output_cap=512),
    Level("tight", output_cap=256),
    Level("minimal", output_cap=128),
    Level("shedding", output_cap=128, shed_below=0),
)
HIGHEST = len(LEVELS) - 1


@dataclass(frozen=True, slots=True)
class Rules:
    """When the conductor changes the level by itself."""

    shares: tuple[float, float, float] = (0.8, 0.5, 0.25)
    """With less than this share of the decode capacity: level 1, 2, 3."""
    crowded: tuple[float, float] = (0.5, 0.75)
    """While capacity is missing, a queue filled to this costs one level more each, up to `minimal`."""
    full: float = 0.9
    """While capacity is missing, a queue filled to this sheds."""
    margin: float = 0.05
    """Capacity and queue must be better than a threshold by this, before a level is left for a lower one."""
    rise_after_s: float = 3.0
    fall_after_s: float = 15.0


_PRESENT = frozenset({ShardState.READY, ShardState.SUSPECT})


@dataclass(frozen=True, slots=True)
class Load:
    """What the level follows from."""

    ready_kv_tokens: int
    """Of the shards that decode and are ready, or were a moment ago."""
    all_kv_tokens: int
    """Of those that decode, whatever their state."""
    waiting: int
    queue_size: int

    @classmethod
    def of(cls, shards: Sequence[ShardView], waiting: int, queue_size: int) -> Load:
        """A shard that never answered has no view, and is not missed: a start is no emergency.

        Nor is one that missed a few polls: what runs there goes on, and if it is gone it will be dead soon.
        """
        decoding = [view for view in shards if view.role is not Role.PREFILL] or shards
        ready = [view for view in decoding if view.state in _PRESENT]
        return cls(
            ready_kv_tokens=sum(view.kv_tokens for view in ready),
            all_kv_tokens=sum(view.kv_tokens for view in decoding),
            waiting=waiting,
            queue_size=queue_size,
        )

    @property
    def capacity(self) -> float:
        """Share of the decode capacity that is ready; 1 where no shard is known."""
        return self.ready_kv_tokens / self.all_kv_tokens if self.all_kv_tokens else 1.0

    @property
    def fullness(self) -> float:
        """Of the queue, as a share."""
        return self.waiting / max(self.queue_size, 1)


@dataclass(frozen=True, slots=True)
class Trend:
    """Since when another level would fit; None while none does.  Seconds of the clock of `decide`."""

    higher_since_s: float | None = None
    lower_since_s: float | None = None


def mode_of(level: int, *, auto: bool = True, reason: str = "") -> Mode:
    """IndexError for a level that the ladder does not have."""
    if level < 0:
        raise IndexError(level)
    step = LEVELS[level]
    return Mode(level, step.output_cap, step.shed_below, auto, reason)


def facts(mode: Mode) -> dict[str, Any]:
    """A mode as JSON, with its name and who has set it."""
    name = LEVELS[min(max(mode.level, 0), HIGHEST)].name
    return {**asdict(mode), "name": name, "set_by": "conductor" if mode.auto else "operator"}


def needed(load: Load, rules: Rules | None = None) -> int:
    """The level for `load` at rest.  One that only has much to do is not degraded: its queue says so."""
    rules = rules or Rules()
    return _needed(load.capacity, load.fullness, rules)


def fitting(load: Load, rules: Rules | None = None) -> Mode:
    """The mode at rest, with its reason where it is not normal."""
    level = needed(load, rules)
    return mode_of(level, reason=told(load, rules) if level else "")


def decide(
    mode: Mode, trend: Trend, load: Load, now_s: float, rules: Rules | None = None
) -> tuple[Mode, Trend]:
    """The mode from now on, and what to pass in next time; one that an operator has set stays.

    `mode` is the one that holds, as Redis has it.
    """
    rules = rules or Rules()
    if not mode.auto:
        return mode, Trend()
    level = min(max(mode.level, 0), HIGHEST)
    if needed(load, rules) > level:
        since_s = _since(trend.higher_since_s, now_s)
        if now_s - since_s < rules.rise_after_s:
            return mode, Trend(higher_since_s=since_s)
        return fitting(load, rules), Trend()
    if level > _needed(load.capacity - rules.margin, load.fullness + rules.margin, rules):
        since_s = _since(trend.lower_since_s, now_s)
        if now_s - since_s < rules.fall_after_s:
            return mode, Trend(lower_since_s=since_s)
        recovering = f"Recovering: {told(load, rules)}" if level > 1 else ""
        return mode_of(level - 1, reason=recovering), Trend()
    return mode, Trend()


def told(load: Load, rules: Rules | None = None) -> str:
    """What the level follows from, in a sentence."""
    rules = rules or Rules()
    sentence = f"{int(100 * load.capacity)} % of the decode capacity was ready"
    if load.fullness >= rules.crowded[0]:
        sentence += f" and the queue was {int(100 * load.fullness)} % full"
    return sentence + "."


def _needed(capacity: float, fullness: float, rules: Rules) -> int:
    lost = sum(capacity < share for share in rules.shares)
    if not lost:
        return 0
    if fullness >= rules.full:
        return HIGHEST
    return min(lost + sum(fullness >= share for share in rules.crowded), HIGHEST - 1)


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s
