"""Tickets, grants, completions, the shard registry and the leader lock, over Redis.

`scripts` holds every key name and every Lua script; `calls` says what each script is given; `link` is the
one way to Redis; `gateway` and `conductor` are the two sides, `protocol` and `fake` a gateway's seam.
"""

from __future__ import annotations

from orchestrator.queues.calls import Timings
from orchestrator.queues.conductor import ConductorQueue, Deposed
from orchestrator.queues.fake import FakeQueue
from orchestrator.queues.gateway import GatewayQueue
from orchestrator.queues.protocol import RequestQueue

__all__ = ["ConductorQueue", "Deposed", "FakeQueue", "GatewayQueue", "RequestQueue", "Timings"]
