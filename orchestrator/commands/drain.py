"""`drain`: a shard gets nothing new and its requests end; it goes on running until it is given back.

It speaks to the deployment's Redis; whichever conductor leads follows within a heartbeat.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

import typer

from orchestrator.commands.degrade import redis_url_of
from orchestrator.config import Loaded
from orchestrator.core.shard import ShardState
from orchestrator.core.ticket import ShardView
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.queues.wishes import Seen, WishKeys
from tgi_patches.contract import Role

POLL_S = 0.2
NO_LEADER = "No conductor leads: nothing happens until one does."


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags say."""

    shard: str
    undo: bool = False
    wait: bool = False
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Told:
    """What holds now."""

    deployment: str
    shard: str
    drained: bool
    changed: bool
    requests: int
    """Reserved on it, or held for others to fetch."""
    idle: bool
    """It is drained, and has none."""
    warning: str = ""


def drain_shard(loaded: Loaded, wish: Wish, *, as_json: bool) -> None:
    """ConfigError for an unknown shard, Unreachable without Redis or deployment.

    OrchestratorError when it was to be idle and is not in time.
    """
    if wish.undo and wish.wait:
        raise ConfigError(
            "--wait is for a shard that is drained, not for one that is given back with --undo."
        )
    told = asyncio.run(_done(loaded, wish))
    if as_json:
        typer.echo(json.dumps(asdict(told), indent=2))
    else:
        typer.echo(sentence(told))
        if told.warning:
            typer.echo(told.warning, err=True)
    if wish.wait and not told.idle:
        raise OrchestratorError(
            f"Shard {told.shard} still has {_requests(told.requests)} after {wish.timeout_s:g} s: "
            "they go on, and it gets nothing new."
        )


def sentence(told: Told) -> str:
    if not told.drained:
        was = "is given back" if told.changed else "was not drained"
        return f"Shard {told.shard} {was}: it serves like the others."
    now = "is drained" if told.changed else "was drained already"
    left = (
        "it is idle"
        if told.idle
        else f"{_requests(told.requests)} {'ends' if told.requests == 1 else 'end'} first"
    )
    return f"Shard {told.shard} {now} and gets nothing new; {left}."


def last_of_its_kind(seen: Seen, shard: str) -> bool:
    """It decodes, and no other shard that is ready does so for requests that are split, or whole."""
    decoding = {view.shard for view in seen.table.shards if view.role is not Role.PREFILL}
    ready = {view.shard for view in seen.table.shards if view.state == ShardState.READY}
    return shard in decoding and not (decoding & ready) - {shard}


async def _done(loaded: Loaded, wish: Wish) -> Told:
    deployment = loaded.settings.deployment
    async with WishKeys(redis_url_of(loaded), deployment) as keys:
        seen = await keys.seen()
        _check_known(wish.shard, seen.names | seen.drained)
        changed = await (keys.give_back(wish.shard) if wish.undo else keys.drain(wish.shard))
        if wish.wait:
            seen = await _idle(keys, wish)
    view = _view(seen, wish.shard)
    held = 0 if view is None else view.reserved_slots + view.outstanding_records
    return Told(
        deployment,
        wish.shard,
        drained=not wish.undo,
        changed=changed,
        requests=held,
        idle=not wish.undo and _is_idle(seen, wish.shard),
        warning=_warning(seen, wish),
    )


def _warning(seen: Seen, wish: Wish) -> str:
    if not seen.table.leader:
        return NO_LEADER
    if not wish.undo and last_of_its_kind(seen, wish.shard):
        return (
            f"No other shard that decodes is ready: until {wish.shard} is given back with --undo, "
            "requests go whole to prefill shards, or wait."
        )
    return ""


async def _idle(keys: WishKeys, wish: Wish) -> Seen:
    """The last look: it is idle, or the time is over."""
    until_s = asyncio.get_running_loop().time() + wish.timeout_s
    while True:
        seen = await keys.seen()
        if _is_idle(seen, wish.shard) or asyncio.get_running_loop().time() >= until_s:
            return seen
        await asyncio.sleep(POLL_S)


def _is_idle(seen: Seen, shard: str) -> bool:
    view = _view(seen, shard)
    if view is None or not seen.table.leader:
        return view is None and bool(seen.table.leader)
    told = view.state in (ShardState.DRAINING, ShardState.DEAD)
    return told and not (view.reserved_slots or view.outstanding_records)


def _view(seen: Seen, shard: str) -> ShardView | None:
    """None for one that has never answered."""
    return next((view for view in seen.table.shards if view.shard == shard), None)


def _check_known(shard: str, known: Collection[str]) -> None:
    if shard not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"There is no shard {shard!r} in this deployment: there are {names}.")


def _requests(count: int) -> str:
    return f"{count} {'request' if count == 1 else 'requests'}"
