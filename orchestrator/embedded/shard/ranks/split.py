"""A rank's part of a decoder's weights (Shoeybi et al. 2019, Megatron-LM).

Queries, keys, values and the MLP's first layers are cut by output, so that a rank has whole heads; the
layers that follow them are cut by input, and their parts summed over the ranks.  Everything else is
whole on every rank.  Which layer is which, transformers' own plan of the architecture tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from orchestrator.embedded.shard.loading import INT8, Loaded
from orchestrator.errors import ConfigError

_BY_OUTPUT, _BY_INPUT = "colwise", "rowwise"
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles that are as right where every rank has all of the module."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class SummedLinear(Module):
    """The columns of a linear layer that this rank has the inputs for; `add` sums over the ranks in place."""

    def __init__(self, whole: Linear, columns: slice, add: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.weight = _part(whole.weight[:, columns])
        self.bias = whole.bias
        self._add = add

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in / ranks] -> [..., out]; the bias is added once."""
        out = linear(inputs, self.weight)
        self._add(out)
        return out if self.bias is None else out + self.bias


def check_split(loaded: Loaded, ranks: int) -> None:
    """ConfigError in one sentence for a model that cannot be cut into so many parts."""
    if loaded.quantization == INT8:
        raise ConfigError("int8 weights are not split over ranks: use float32 or bfloat16.")
    heads = loaded.model.config.num_attention_heads
    for count, what in ((loaded.kv_heads, "KV heads"), (heads, "attention heads")):
        if count % ranks:
            raise ConfigError(f"The model's {count} {what} cannot be split over {ranks} ranks.")
    for name, module, style in _planned(loaded.model):
        size = module.out_features if style == _BY_OUTPUT else module.in_features
        if size % ranks:
            raise ConfigError(f"The {size} features of {name} cannot be split over {ranks} ranks.")


def split(loaded: Loaded, rank: int, ranks: int, add: Callable[[Tensor], None]) -> Loaded:
    """`loaded` with its weights cut down, in place, to those of `rank`.  `check_split` comes first."""
    for name, module, style in list(_planned(loaded.model)):
        if style == _BY_OUTPUT:
            _keep_rows(module, _range(module.out_features, rank, ranks))
        else:
            part = SummedLinear(module, _range(module.in_features, rank, ranks), add)
            loaded.model.base_model.set_submodule(name, part)
    return replace(loaded, kv_heads=loaded.kv_heads // ranks)


def _planned(model: Any) -> Iterator[tuple[str, Linear, str]]:
    """(name, module, style) of the layers that are cut; ConfigError where the plan needs more than that."""
    kind = type(model).__name__
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(f"transformers has no plan to split a {kind} over ranks.")
    if others := sorted(set(plan.values()) - _WHOLE - {_BY_OUTPUT, _BY_INPUT}):
        raise ConfigError(f"A {kind} is split by {', '.join(others)}, which this shard does not do.")
    for name, module in model.base_model.named_modules():
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if style is None or style in _WHOLE:
            continue
        if type(module) is not Linear:
            raise ConfigError(f"{name} of a {kind} is no plain linear layer: it cannot be split over ranks.")
        yield name, module, style


def _range(size: int, rank: int, ranks: int) -> slice:
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)


def _keep_rows(layer: Linear, rows: slice) -> None:
    layer.weight = _part(layer.weight[rows])
    if layer.bias is not None:
        layer.bias = _part(layer.bias[rows])
    layer.out_features = layer.weight.shape[0]


def _part(view: Tensor) -> Parameter:
    """A copy, so that the whole tensor can go."""
    return Parameter(view.clone(memory_format=torch.contiguous_format), requires_grad=False)
