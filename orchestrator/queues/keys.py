"""The names of one deployment's Redis keys."""

from __future__ import annotations

from dataclasses import dataclass, field

GROUP = "conductors"
BODY = "b"
"""The one field of every stream entry: JSON."""
PARTS = ("kv", "slots", "bytes", "records")
"""Of the reservation counters of one incarnation."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one deployment's keys.  The braces keep them in one slot of a Redis cluster."""

    deployment: str
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"orch:{{{self.deployment}}}:")

    @property
    def schema(self) -> str:
        """Version of this layout; whoever finds another one stops."""
        return self.prefix + "schema"

    @property
    def born(self) -> str:
        """Milliseconds at which this Redis first saw the deployment, or saw it again after a standstill."""
        return self.prefix + "born"

    @property
    def seen(self) -> str:
        """Milliseconds of the last sign of life of any gateway or conductor."""
        return self.prefix + "seen"

    @property
    def pulse(self) -> str:
        """The leader value of a conductor that has looked at its tickets just now, with a time to live."""
        return self.prefix + "pulse"

    @property
    def leader(self) -> str:
        """`<conductor>:<fence>` of the leading conductor, with a time to live."""
        return self.prefix + "leader"

    @property
    def fence(self) -> str:
        """Counts elections."""
        return self.prefix + "fence"

    @property
    def mode(self) -> str:
        """JSON."""
        return self.prefix + "mode"

    @property
    def wanted(self) -> str:
        """JSON: `id` of one `apply`, and the launch orders that are wanted since."""
        return self.prefix + "wanted"

    @property
    def drained(self) -> str:
        """Set of shards that an operator has drained."""
        return self.prefix + "drained"

    @property
    def orders(self) -> str:
        """JSON list: the orders with which the leader's shards run."""
        return self.prefix + "orders"

    @property
    def roll(self) -> str:
        """JSON: how far the leader is on its way to what is wanted."""
        return self.prefix + "roll"

    @property
    def tickets(self) -> str:
        """Stream of undecided tickets; a decision deletes its entry."""
        return self.prefix + "tickets"

    @property
    def completions(self) -> str:
        """Stream of ends, and of records that were imported, until a conductor has heard of them."""
        return self.prefix + "completions"

    @property
    def shards(self) -> str:
        """Set of shard names; `shard:{name}` is a hash of state, epoch and view with a time to live."""
        return self.prefix + "shards"

    @property
    def reserved(self) -> str:
        """Hash of all reservation counters."""
        return self.prefix + "reserved"

    @property
    def gateways(self) -> str:
        """Set of gateway incarnations that may hold leases."""
        return self.prefix + "gateways"

    def shard(self, shard: str) -> str:
        return f"{self.prefix}shard:{shard}"

    def gateway(self, gateway: str) -> str:
        """Exists while the gateway's heart beats."""
        return f"{self.prefix}gateway:{gateway}"

    def queued(self, gateway: str) -> str:
        """Hash: handle -> entry in `tickets`."""
        return f"{self.prefix}queued:{gateway}"

    def leases(self, gateway: str) -> str:
        """Hash: handle -> lease."""
        return f"{self.prefix}leases:{gateway}"

    def grants(self, gateway: str) -> str:
        """Stream of answers for one gateway incarnation, which alone reads it."""
        return f"{self.prefix}grants:{gateway}"
