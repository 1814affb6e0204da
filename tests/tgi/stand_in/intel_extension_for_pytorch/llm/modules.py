"""The modules that TGI's layers use."""

from __future__ import annotations

from typing import Any

from .paged import PagedAttention

__all__ = ["GatedMLPMOE", "PagedAttention"]


class GatedMLPMOE:
    """Imported by TGI for every model; a mixture of experts is refused."""

    def __init__(self, *args: Any, **named: Any) -> None:
        raise NotImplementedError("the stand-in for IPEX serves no mixture of experts")
