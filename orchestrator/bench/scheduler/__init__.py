"""What scheduling costs and what it buys: client and conductor on a real Redis, policies in virtual time.

`queue` and `conductor` count CPU time of real processes, `lengths` and `burst` simulate with the
production policy, `break-even` asks a live deployment.  See docs/benchmarks.md, "The scheduler".
"""

from __future__ import annotations
