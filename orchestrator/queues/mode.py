"""The mode key, from outside a gateway or a conductor: an operator's way to it, and a leader's.

An operator's setting (`auto` false) stands until an operator gives it back: a leader that had not heard of it
cannot replace it.
"""

from __future__ import annotations

from typing import Self

from orchestrator.core.decision import Mode
from orchestrator.errors import ConfigError, Unreachable
from orchestrator.queues import calls, wire
from orchestrator.queues.address import Command
from orchestrator.queues.calls import Timings
from orchestrator.queues.resp import RespClient, Say
from orchestrator.queues.scripts import SCHEMA_VERSION, Keys
from orchestrator.queues.table import Table
from tgi_patches.contract import checked_part

_BY_LEADER = """
-- KEYS leader mode  ARGV leader mode  -> set | held | fenced
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
local held = redis.call('GET', KEYS[2])
if held then
  local read, mode = pcall(cjson.decode, held)
  if read and type(mode) == 'table' and mode.auto == false then return 'held' end
end
redis.call('SET', KEYS[2], ARGV[2])
return 'set'
"""


def by_leader(keys: Keys, leader: str, mode: Mode) -> Command:
    """Sets what a leading conductor chose.  Answers `set`, `held` (by an operator) or `fenced`."""
    return ("EVAL", _BY_LEADER, 2, keys.leader, keys.mode, leader, wire.encode(mode))


class ModeKey:
    """One deployment's mode and what it follows from.  Leaves a Redis without this deployment untouched."""

    def __init__(self, redis_url: str, deployment: str, *, timings: Timings | None = None) -> None:
        self._keys = Keys(checked_part(deployment, "deployment name"))
        deadline_s = (timings or Timings()).deadline_s
        self._client = RespClient(redis_url, deadline_s=deadline_s, greet=self._check)

    async def __aenter__(self) -> Self:
        """Raises Unreachable without Redis or deployment, ConfigError for a foreign schema."""
        await self._client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def table(self) -> Table:
        """Mode, leader, queue and shards as they are now."""
        call = calls.table(self._keys)
        script = ("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
        return Table.parse(await self._client.send(*script))

    async def set(self, mode: Mode) -> None:
        """As an operator; gateways and conductor follow within a second."""
        await self._client.send("SET", self._keys.mode, wire.encode(mode))

    async def _check(self, say: Say) -> None:
        found, gateways = await say([("GET", self._keys.schema), ("EXISTS", self._keys.gateways)])
        name = self._keys.deployment
        if found is None and gateways:
            return  # emptied while it ran: only a new connection writes the schema
        if found is None:
            raise Unreachable(f"This Redis holds no deployment {name!r}.")
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"Redis holds deployment {name!r} in schema {found} and this version needs {SCHEMA_VERSION}."
            )
