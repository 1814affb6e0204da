"""What an operator wants of the shards: other ones, or drained ones; and what a leader says of it.

An operator writes `wanted` and `drained`, the leader alone `orders` and `roll`.  What cannot be read of
`wanted` is as if it were not there, and logged once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
import structlog

from orchestrator.core.order import ShardOrder
from orchestrator.core.roll import Roll
from orchestrator.queues import calls
from orchestrator.queues.address import Command
from orchestrator.queues.keys import Keys
from orchestrator.queues.operator import OperatorLink
from orchestrator.queues.table import Table
from tgi_patches.contract import ShardSpec, new_handle

log = structlog.get_logger()

_TOLD = """
-- KEYS leader orders roll drained wanted  ARGV leader orders roll wanted drained-count drained...
-- -> told | fenced.  What the leader knows; wanted '' and a count of 0 leave these as they are.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', KEYS[5], ARGV[4]) end
if tonumber(ARGV[5]) > 0 then redis.call('SADD', KEYS[4], unpack(ARGV, 6)) end
return 'told'
"""
_FORGOTTEN = """
-- KEYS leader key...  ARGV leader  -> forgotten | fenced
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
return 'forgotten'
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The orders of one `apply`."""

    id: str
    orders: tuple[ShardSpec, ...]

    @classmethod
    def of(cls, orders: Iterable[ShardSpec]) -> Self:
        """A new wish, with an id of its own."""
        return cls(new_handle(), tuple(orders))

    def text(self) -> str:
        orders = [order.to_dict() for order in self.orders]
        return orjson.dumps({"id": self.id, "orders": orders}).decode()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a leader reads."""

    wanted: str = ""
    """For `read_wanted`."""
    drained: frozenset[str] = frozenset()
    fresh: bool = False
    """Nothing of what a leader says is there: Redis came up empty, or nobody has led yet."""


def read_wanted(text: str) -> Wanted | None:
    """None for an empty text; ValueError, in a sentence, for what is no list of orders."""
    if not text:
        return None
    try:
        raw = orjson.loads(text)
        orders = tuple(ShardOrder.from_dict(each) for each in raw["orders"])
        names = {order.shard for order in orders}
        if not (isinstance(raw["id"], str) and raw["id"]):
            raise ValueError("it has no id")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"The wanted shards in Redis cannot be read, and nothing is changed: {error}"
        ) from None
    if not orders or len(names) != len(orders):
        raise ValueError("The wanted shards in Redis are none, or two of one name: nothing is changed.")
    return Wanted(raw["id"], orders)


def looking(keys: Keys) -> list[Command]:
    """What `looked` reads."""
    return [("GET", keys.wanted), ("SMEMBERS", keys.drained), ("EXISTS", keys.orders)]


def looked(replies: Sequence[Any]) -> Wishes:
    wanted, drained, known = replies
    return Wishes(wanted or "", frozenset(drained), not known)


def told(
    keys: Keys,
    leader: str,
    orders: Sequence[ShardSpec],
    roll: Roll,
    wanted: Wanted | None,
    drained: Iterable[str],
) -> Command:
    """Answers `told` or `fenced`.  `wanted` and `drained` are told where Redis has lost them."""
    names = sorted(drained)
    texts = (_encoded([order.to_dict() for order in orders]), _encoded(roll), wanted.text() if wanted else "")
    script = ("EVAL", _TOLD, 5, keys.leader, keys.orders, keys.roll, keys.drained, keys.wanted)
    return (*script, leader, *texts, len(names), *names)


def forgotten(keys: Keys, leader: str) -> Command:
    """All of it: the deployment ends.  Answers `forgotten` or `fenced`."""
    names = (keys.leader, keys.wanted, keys.drained, keys.orders, keys.roll)
    return ("EVAL", _FORGOTTEN, len(names), *names, leader)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an operator sees."""

    table: Table
    names: frozenset[str]
    """Of all shards in the registry, also those that have never answered."""
    orders: tuple[ShardOrder, ...] | None
    """None where no leader has told them."""
    roll: Roll
    drained: frozenset[str] = field(default_factory=frozenset)


class WishKeys(OperatorLink):
    """What an operator sees and wants of a deployment's shards."""

    async def seen(self) -> Seen:
        keys = self._keys
        call = calls.table(keys)
        table, names, orders, roll, drained = await self._client.all(
            [
                ("EVAL", call.script.text, len(call.keys), *call.keys, *call.args),
                ("SMEMBERS", keys.shards),
                ("GET", keys.orders),
                ("GET", keys.roll),
                ("SMEMBERS", keys.drained),
            ]
        )
        return Seen(
            Table.parse(table),
            frozenset(names),
            None if orders is None else tuple(map(ShardOrder.from_dict, orjson.loads(orders))),
            read_roll(roll or ""),
            frozenset(drained),
        )

    async def want(self, wanted: Wanted) -> None:
        """The leader follows within a heartbeat."""
        await self._client.send("SET", self._keys.wanted, wanted.text())

    async def drain(self, shard: str) -> bool:
        """False where it was drained already."""
        return bool(await self._client.send("SADD", self._keys.drained, shard))

    async def give_back(self, shard: str) -> bool:
        """False where it was not drained."""
        return bool(await self._client.send("SREM", self._keys.drained, shard))


def read_roll(text: str) -> Roll:
    """What cannot be read is no roll."""
    try:
        raw = orjson.loads(text or "{}")
        return Roll(
            **{name: raw[name] for name in ("id", "state", "doing", "done", "problem") if name in raw}
        )
    except (TypeError, ValueError, AttributeError) as error:
        log.warning("roll_unreadable", error=str(error))
        return Roll()


def _encoded(fact: Any) -> str:
    return orjson.dumps(fact).decode()
