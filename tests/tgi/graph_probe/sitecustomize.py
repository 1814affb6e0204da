"""Writes down how every forward of a TGI server was computed, and gives it graphs that run on a CPU.

Python imports this at start where its folder is on PYTHONPATH.  GRAPH_PROBE names the file: a line per
forward, `prefill`, `decode` or `graph`, and its rows.  GRAPH_PROBE_SIZES are the sizes of graphs.  A graph
here is TGI's dictionary of static tensors with a `replay` that computes from them eagerly, as a captured one
would: it sees nothing of the call but what TGI copied into those tensors.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from tgi_patches.entrypoint.on_import import on_import

FLASH = "text_generation_server.models.flash_causal_lm"


@dataclass(slots=True)
class EagerGraph:
    """In torch.cuda.CUDAGraph's place."""

    model: Any
    static: dict[str, Any]
    max_s: int
    seqlen_class: Any

    def replay(self) -> None:
        static = self.static
        logits, _ = self.model.model.forward(
            input_ids=static["input_ids"],
            position_ids=static["position_ids"],
            cu_seqlen_prefill=None,
            kv_cache=static["kv_cache"],
            block_tables=static["block_tables"],
            slots=static["slots"],
            seqlen=self.seqlen_class(
                input_lengths=static["input_lengths"],
                cache_lengths=static["cache_lengths"],
                cu_seqlen_q=None,
                max_q=1,
                max_k=self.max_s,
            ),
            max_s=self.max_s,
            prefill_cache_indices=None,
            lm_head_indices=None,
            graph=True,
        )
        if static["logits"] is None:
            static["logits"] = logits.clone()
        static["logits"].copy_(logits)


def _graph(model: Any, rows: int, max_s: int) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    integers = {"dtype": torch.int32, "device": model.device}
    static = {
        "input_ids": torch.zeros(rows, dtype=torch.int64, device=model.device),
        "position_ids": torch.zeros(rows, **integers),
        "kv_cache": model.kv_cache,
        "block_tables": torch.zeros((rows, max_s), **integers),
        "slots": torch.zeros(rows, dtype=torch.int64, device=model.device),
        "input_lengths": torch.ones(rows, **integers),
        "cache_lengths": torch.zeros(rows, **integers),
        "state": None,
        "logits": None,
        "speculative_logits": None,
    }
    seqlen = importlib.import_module("text_generation_server.layers.attention").Seqlen
    static["graph"] = EagerGraph(model, static, max_s, seqlen)
    return static


def _watch(model: Any, max_s: int) -> None:
    plain = getattr(model.model.forward, "plain", model.model.forward)  # Warmup may come again

    def forward(*args: Any, graph: bool = False, **kwargs: Any) -> Any:
        kind = "graph" if graph else "decode" if kwargs["cu_seqlen_prefill"] is None else "prefill"
        with Path(os.environ["GRAPH_PROBE"]).open("a") as log:
            log.write(f"{kind} {len(kwargs['seqlen'].input_lengths)}\n")
        return plain(*args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    model.model.forward = forward
    for rows in map(int, filter(None, os.environ.get("GRAPH_PROBE_SIZES", "").split(","))):
        model.cuda_graphs[rows] = _graph(model, rows, max_s)


def _probe() -> None:
    flash = importlib.import_module(FLASH).FlashCausalLM
    warmup = flash.warmup

    @wraps(warmup)
    def warmed(model: Any, batch: Any, max_input: Any, max_total: Any) -> Any:
        result = warmup(model, batch, max_input, max_total)
        _watch(model, result[2])
        return result

    flash.warmup = warmed


if "GRAPH_PROBE" in os.environ:
    on_import(FLASH, _probe)
