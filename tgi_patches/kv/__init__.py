"""Paged KV as the runs of bytes that a bridge copies: the seam, without torch.

A record holds `[layer][k|v][token][kv_head][head_dim]`.  `in_place.py` hands out a pool that has this
order already, `staged.py` rearranges any other, `padded.py` does it for a cache without slots.
"""

from __future__ import annotations

from typing import Protocol

from tgi_patches.bridge import Planes


class Inbox(Protocol):
    """Where one prompt's KV arrives, and its way to where the model reads it."""

    @property
    def planes(self) -> Planes:
        """Writable, for all tokens of the prompt."""

    def commit(self) -> None:
        """Everything has arrived and was verified: give it to the model."""

    def repair(self) -> None:
        """Put the last token's KV back: a one-row GEMM rounds differently from the prompt's."""
