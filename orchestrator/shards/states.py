"""What is known of all shards of a deployment, and what is told of them; changed by observations only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from orchestrator.core.shard import (
    Drained,
    Exited,
    GivenBack,
    Launched,
    Observation,
    Rules,
    ShardState,
    Watched,
    observe,
)
from tgi_patches.contract import ShardSpec

log = structlog.get_logger()

HELD = "Shard {} is drained by an operator: it gets nothing new until `tgi-orchestrator drain {} --undo`."


class States:
    """`changed` is set when something changed, `ready` while every shard is ready that should be."""

    def __init__(self, specs: Iterable[ShardSpec], rules: Rules, now: Callable[[], float] | None) -> None:
        self.changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.problems: dict[str, str] = {}
        """One sentence per shard that does not run as it should."""
        self.gone: set[tuple[str, int]] = set()
        """Incarnations that ended and may still have reservations; the conductor empties it."""
        self.pids: dict[str, int | None] = {}
        self.specs: dict[str, ShardSpec] = {spec.shard: spec for spec in specs}
        """The orders with which the shards run, or are launched next."""
        self.watched = {spec.shard: Watched(spec.shard, spec.role) for spec in self.specs.values()}
        self.observed: set[str] = set()
        """Shards that somebody else keeps."""
        self.held: frozenset[str] = frozenset()
        """Names that an operator has drained, of whatever shards there are or will be."""
        self.leaving: set[str] = set()
        """Shards that nobody wants any more: they are never launched again."""
        self.released: set[str] = set()
        """Names of drained shards that are no more; the conductor empties it."""
        self.rules = rules
        self.now = now or time.monotonic

    def add(self, spec: ShardSpec) -> None:
        """It is kept from now on, or with another order than before."""
        self.specs[spec.shard] = spec
        if spec.shard not in self.watched:
            self.watched[spec.shard] = Watched(spec.shard, spec.role)
            self._look()

    def remove(self, shard: str) -> None:
        """It ended and is not expected back."""
        self.note(shard, Exited())
        if shard in self.held:
            self.released.add(shard)
            self.held -= {shard}
        del self.specs[shard], self.watched[shard]
        self.problems.pop(shard, None)
        self.pids.pop(shard, None)
        self.leaving.discard(shard)
        self.observed.discard(shard)
        self._look()

    def launched(self, shard: str, launch: Launched) -> None:
        """It begins anew, or is found; one that an operator has drained gets nothing."""
        self.note(shard, launch)
        if shard in self.held:
            self._hold(shard)

    def hold(self, shards: frozenset[str]) -> None:
        """These are drained by an operator, and no others."""
        before, self.held = self.held, shards
        for shard in sorted(shards - before):
            self._hold(shard)
        for shard in sorted(before - shards):
            if shard in self.watched and shard not in self.leaving:
                self.problems.pop(shard, None)
                self.note(shard, GivenBack())
                log.info("shard_given_back", shard=shard)
        if before != shards:
            self._look()

    def _hold(self, shard: str) -> None:
        if shard not in self.watched:
            return
        self.problem(shard, HELD.format(shard, shard))
        self.note(shard, Drained())
        log.info("shard_drained", shard=shard, by="operator")

    def problem(self, shard: str, sentence: str) -> None:
        if self.problems.get(shard) != sentence:
            self.problems[shard] = sentence
            self.changed.set()

    def note(self, shard: str, observation: Observation) -> None:
        before = self.watched[shard]
        rules = self.rules.for_observed() if shard in self.observed else self.rules
        after = self.watched[shard] = observe(before, observation, self.now(), rules)
        if before.epoch and (after.epoch != before.epoch or after.state is ShardState.DEAD):
            self.gone.add((shard, before.epoch))
        if (after.state, after.epoch) == (before.state, before.epoch):
            return
        if after.state is ShardState.READY:
            self.problems.pop(shard, None)
        took_s = self.now() - after.launched_s if after.launched_s else 0.0
        log.info("shard_state", shard=shard, state=after.state, epoch=after.epoch, took_s=round(took_s, 3))
        self._look()

    def _look(self) -> None:
        expected = [one for one in self.watched.values() if one.shard not in self.leaving | self.held]
        if all(one.state is ShardState.READY for one in expected):
            self.ready.set()
        else:
            self.ready.clear()
        self.changed.set()
