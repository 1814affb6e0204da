"""Records of other hosts: the decode shard's sidecar fetches them from the prefill shard's, over TCP.

    puller                                    server
                                          <-  WELCOME version, challenge
    HELLO version, challenge              ->
    DESCRIBE rank 0, proof                ->
                                          <-  FOUND what stands in front of the data, proof
    FETCH rank 0, from which chunk, proof ->
                                          <-  BUSY ... DATA proof, then bytes and CHUNK in turn
    DESCRIBE, FETCH rank 1 ...

One connection serves one pull, with all ranks in turn: nothing is left over from a pull that failed,
a new key counts at once, and two round trips more are little beside a record.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_MIN_BYTES = 256 * 1024
CHUNK_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Of both sides.  The whole pull ends with `PullRequest.timeout_s`."""

    connect_s: float = 2.0
    step_s: float = 2.0
    """A connection on which nothing moves for so long is broken."""
    chunk_bytes: int = 4 * 2**20
    """Sent between two looks whether the record is still there."""
    pulls_at_once: int = 8
    """Further ones wait for their turn until their deadline."""

    def __post_init__(self) -> None:
        if not CHUNK_MIN_BYTES <= self.chunk_bytes <= CHUNK_MAX_BYTES:
            raise ValueError(
                f"chunk_bytes must be {CHUNK_MIN_BYTES} to {CHUNK_MAX_BYTES}, not {self.chunk_bytes}."
            )
        if self.pulls_at_once < 1 or min(self.connect_s, self.step_s) <= 0:
            raise ValueError("pulls_at_once, connect_s and step_s must be above 0.")
