"""HTTP/1.1 to shards, as cheap as an event loop allows: one protocol, one pool, a deadline on every step.

errors.py      what can go wrong
connection.py  one connection, one exchange at a time
deadline.py    one lazy timer for each connection
pool.py        idle connections by origin; an exchange with its one retry
transport.py   the same for httpx
"""

from orchestrator.shards.http.connection import Connection
from orchestrator.shards.http.deadline import Within
from orchestrator.shards.http.errors import CannotConnect, ConnectionLost, HttpError, Malformed, PoolFull
from orchestrator.shards.http.pool import Origin, Pool, message
from orchestrator.shards.http.transport import PooledTransport

__all__ = [
    "CannotConnect",
    "Connection",
    "ConnectionLost",
    "HttpError",
    "Malformed",
    "Origin",
    "Pool",
    "PoolFull",
    "PooledTransport",
    "Within",
    "message",
]
