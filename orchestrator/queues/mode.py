"""The mode key, from outside a gateway or a conductor: an operator's way to it, and a leader's.

An operator's setting (`auto` false) stands until an operator gives it back: a leader that had not heard of it
cannot replace it.
"""

from __future__ import annotations

from orchestrator.core.decision import Mode
from orchestrator.queues import calls, wire
from orchestrator.queues.address import Command
from orchestrator.queues.keys import Keys
from orchestrator.queues.operator import OperatorLink
from orchestrator.queues.table import Table

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


class ModeKey(OperatorLink):
    """One deployment's mode and what it follows from."""

    async def table(self) -> Table:
        """Mode, leader, queue and shards as they are now."""
        call = calls.table(self._keys)
        script = ("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
        return Table.parse(await self._client.send(*script))

    async def set(self, mode: Mode) -> None:
        """As an operator; gateways and conductor follow within a second."""
        await self._client.send("SET", self._keys.mode, wire.encode(mode))
