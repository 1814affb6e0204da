"""What stands beside a shard and answers for its records.

`core` is the part that every kind of shard has; the rest is the process of its own that TGI needs:
`python -m tgi_patches.sidecar`.
"""

from tgi_patches.sidecar.core import FAILURES_KEPT, WAIT_LIMIT_S, OwnRecords, Sidecar

__all__ = ["FAILURES_KEPT", "WAIT_LIMIT_S", "OwnRecords", "Sidecar"]
