"""The shard table as a gateway last read it, and what is left of it without Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import structlog

from orchestrator.core.decision import Mode
from orchestrator.core.routing import reserve
from orchestrator.core.ticket import Grant, ShardView
from orchestrator.queues import wire

log = structlog.get_logger()

SHARE_WITHOUT_REDIS = 0.5
"""Of every capacity, for all gateways together."""


@dataclass(frozen=True, slots=True)
class Table:
    """A snapshot of Redis; empty before the first one."""

    leader: str = ""
    """Empty while no conductor leads."""
    mode: Mode = field(default_factory=Mode)
    gateways: int = 1
    waiting: int = 0
    shards: tuple[ShardView, ...] = ()
    """By name, reservations included."""
    problems: tuple[str, ...] = ()
    """A sentence for each shard that does not run as it should."""

    @classmethod
    def parse(cls, reply: Sequence[Any], last: Table | None = None) -> Self:
        """The reply of `scripts.TABLE`.

        When no conductor leads, nobody publishes: shards that lapsed from Redis are kept from `last`, also
        until a new leader has published its first table; what that does not know yet, `last` knows.
        """
        leader, mode, gateways, waiting, reserved, *rows = reply
        counters = wire.counters(reserved)
        views = {view.shard: view for view in _views(rows)}
        if last is not None:
            views = _kept(last, rows, everything=not (leader and rows)) | views
        return cls(
            leader=leader,
            mode=read_mode(mode),
            gateways=max(1, gateways),
            waiting=waiting,
            shards=tuple(wire.booked(views[name], counters) for name in sorted(views)),
            problems=tuple(filter(None, dict(sorted(zip(rows[::4], rows[3::4], strict=True))).values())),
        )


def read_mode(text: str) -> Mode:
    """The mode key's value; what cannot be read is the normal mode."""
    try:
        return wire.mode(text)
    except wire.WireError as error:
        log.warning("mode_unreadable", error=str(error))
        return Mode()


def _kept(last: Table, rows: Sequence[str], *, everything: bool) -> dict[str, ShardView]:
    """Views of `last`, in the state that was published since."""
    states = dict(zip(rows[::4], rows[1::4], strict=True))
    return {
        view.shard: replace(view, state=states.get(view.shard, view.state))
        for view in last.shards
        if everything or view.shard in states
    }


def _views(rows: Sequence[str]) -> Iterable[ShardView]:
    for name, state, text in zip(rows[::4], rows[1::4], rows[2::4], strict=True):
        if not text:
            continue
        try:
            yield wire.view(text, state)
        except wire.WireError as error:
            log.warning("shard_unreadable", shard=name, error=str(error))


def conservative(table: Table, held: Iterable[Grant]) -> tuple[ShardView, ...]:
    """The last table for a gateway that no longer sees the others: its share of half of everything.

    `held` is what this gateway itself has granted and not completed.
    """
    share = SHARE_WITHOUT_REDIS / table.gateways
    shards = tuple(_scaled(view, share) for view in table.shards)
    for grant in held:
        shards = reserve(shards, grant)
    return shards


def _scaled(view: ShardView, share: float) -> ShardView:
    requests = max(1, int(view.limits.max_concurrent_requests * share))
    return replace(
        view,
        kv_tokens=int(view.kv_tokens * share),
        slots=max(1, int(view.slots * share)),
        ring_bytes=int(view.ring_bytes * share),
        limits=replace(view.limits, max_concurrent_requests=requests),
        reserved_kv_tokens=0,
        reserved_slots=0,
        outstanding_bytes=0,
        outstanding_records=0,
    )
