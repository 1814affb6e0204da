"""The functions that TGI's layers call."""

from __future__ import annotations

from .attention import varlen_attention
from .lora import bgmv_expand, bgmv_shrink, sgmv_expand, sgmv_shrink
from .norms import add_layer_norm, add_rms_norm
from .rotary import rotary_embedding

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bgmv_expand",
    "bgmv_shrink",
    "rotary_embedding",
    "sgmv_expand",
    "sgmv_shrink",
    "varlen_attention",
]
