"""What the settings say now against what runs: shards by content, and settings that only a restart brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.rolling import NAMED, PLACE, at_its_place, content, fields_of, match
from tgi_patches.contract import ShardSpec

ROLLED = ("shards.", "limits.max_", "arena.", "docker.image", "tgi.")
"""Settings that are in the shards' orders: new shards bring them."""
FOUNDATIONS = ("deployment", "launcher", "model.", "key_file", "arena.dir", "docker.host", "docker.network")
"""Those that old and new shards must share to serve side by side: with another one nothing is rolled."""
ELSEWHERE = (".urls", ".sidecar_port")
"""The same, by the end of the key: shards that others keep."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field of a shard, or one setting."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class ShardChange:
    """A running shard that is replaced."""

    shard: str
    changes: tuple[Change, ...]
    """Of its content, and GPUs or a port that it must have now."""


@dataclass(frozen=True, slots=True)
class Difference:
    """By shard; empty where what runs is what is wanted."""

    added: tuple[ShardSpec, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[ShardChange, ...] = ()
    same: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "added": [{"shard": order.shard, "role": str(order.role)} for order in self.added],
            "removed": list(self.removed),
            "changed": [
                {"shard": one.shard, "changes": [_told(change) for change in one.changes]}
                for one in self.changed
            ],
            "same": list(self.same),
        }


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Settings that differ from those of the running `up`, and that a roll does not bring."""

    changes: tuple[Change, ...] = ()

    @property
    def foundations(self) -> tuple[str, ...]:
        """Keys that forbid a roll."""
        return tuple(change.name for change in self.changes if _foundation(change.name))

    def to_list(self) -> list[dict[str, Any]]:
        """JSON."""
        return [_told(change) for change in self.changes]


def difference(wanted: Sequence[ShardSpec], running: Sequence[ShardSpec]) -> Difference:
    """A shard that is to be replaced is told beside the first of its role that comes instead."""
    matched = match(wanted, running)
    known = {order.shard: order for order in running}
    left = list(matched.launch)
    changed, removed = [], []
    for shard in matched.retire:
        old = known[shard]
        new = next((order for order in left if order.role == old.role), None)
        if new is None:
            removed.append(shard)
            continue
        left.remove(new)
        changed.append(ShardChange(shard, tuple(_changes(old, new))))
    same = tuple(one.order.shard for one in matched.keep)
    return Difference(tuple(left), tuple(removed), tuple(changed), same)


def restart_settings(running: Mapping[str, Any], now: Mapping[str, Any]) -> SettingsChange:
    """By dotted key, both as JSON has them.  Keys that one side does not know are left out."""
    return SettingsChange(
        tuple(
            Change(key, running[key], value)
            for key, value in now.items()
            if key in running and running[key] != value and not _rolled(key)
        )
    )


def _changes(old: ShardSpec, new: ShardSpec) -> Iterator[Change]:
    before, after = content(old), content(new)
    place_before, place_after = fields_of(old), fields_of(new)
    for name in place_before:
        if name in PLACE:
            differs = (name in NAMED and not at_its_place(new, old, name)) or before.get(name) != after.get(
                name
            )
        else:
            differs = before[name] != after[name]
        if differs:
            yield Change(name, place_before[name], place_after[name])


def _rolled(key: str) -> bool:
    return key.startswith(ROLLED) and not _foundation(key)


def _foundation(key: str) -> bool:
    return key.startswith(FOUNDATIONS) or key.endswith(ELSEWHERE)


def _told(change: Change) -> dict[str, Any]:
    return {"name": change.name, "old": change.old, "new": change.new}
