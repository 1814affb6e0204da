"""Imported prompts as decode rows: a step that computes one token of each request needs no prefill kernels.

TGI runs every step that has a new request as a prefill, outside its CUDA graphs.  After an import one token
is left, so the row is a decode row: `cu_seqlen_prefill` is hidden from that forward and put back after it.
Off unless ORCHESTRATOR_TGI_GRAPH_JOINS=1.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tgi_patches.hooks import guard, log
from tgi_patches.hooks.overlay import Overlay
from tgi_patches.hooks.rows import rows_of
from tgi_patches.hooks.wrap import wrap

VARIABLE = "ORCHESTRATOR_TGI_GRAPH_JOINS"

_COMMON = "text_generation_server.layers.attention.common"
KNOWN: guard.Known = MappingProxyType(
    {
        "text_generation_server.models.flash_causal_lm:FlashCausalLM.forward": ("ce1c073ba0c38cae",),
        f"{_COMMON}:Seqlen.__init__": ("2ff5e0b64dff35a5",),
    }
)
"""What decides between prefill and decode, beside what guard.FLASH has; see guard.py."""

_HIDDEN = ("cu_seqlen_prefill", "prefill_head_indices")
"""All that `forward` reads of a batch's prefill; one token per row makes both say: every row."""


def wanted(env: Mapping[str, str]) -> bool:
    return env.get(VARIABLE, "") == "1"


def install(module: Any, overlay: Overlay) -> GraphJoins | None:
    """`module` is TGI's flash_causal_lm.  None where its `forward` is not one that this was tested with."""
    unknown = guard.differences(KNOWN)
    if unknown:
        log.warn("overlay_graph_joins_off", reason=guard.sentence(unknown))
        return None
    joins = GraphJoins(overlay)
    wrap(module.FlashCausalLM, "forward", joins.forward)
    return joins


class GraphJoins:
    """Around FlashCausalLM.forward."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self.taken = 0
        """Steps that ran as a decode."""

    def forward(self, original: Callable[..., Any], model: Any, batch: Any, adapter_data: Any) -> Any:
        if not self._overlay.shielded(lambda: decodes_only(batch, adapter_data), False):
            return original(model, batch, adapter_data)
        kept = {name: getattr(batch, name) for name in _HIDDEN}
        try:
            for name in _HIDDEN:
                setattr(batch, name, None)
            self.taken += 1
            return original(model, batch, adapter_data)
        finally:
            for name, value in kept.items():
                setattr(batch, name, value)


def decodes_only(batch: Any, adapter_data: Any) -> bool:
    """Every row has one token, and those that would prefill it have the rest from a record.

    A prompt of one token, or a last chunk of one, is left to TGI: without a handle nothing changes.
    Under a LoRA adapter prefill and decode take other kernels, and what was prepared is prefill's.
    """
    if batch.cu_seqlen_prefill is None or batch.speculative_ids is not None or adapter_data.data:
        return False
    if any(length != 1 for length in batch.input_lengths):
        return False
    rows = rows_of(batch)
    new = [
        request.id
        for request, prefilling in zip(batch.requests, batch.prefilling_mask, strict=True)
        if prefilling
    ]
    return bool(new) and all(id_ in rows and rows[id_].imported is not None for id_ in new)
