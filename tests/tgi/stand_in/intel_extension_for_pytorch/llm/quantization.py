"""Names that TGI's quantized layers import; a quantized model is refused."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

__all__ = ["IPEXWeightOnlyQuantizedLinear", "QuantDtype", "QuantMethod"]


class QuantMethod(Enum):
    GPTQ_GEMM = auto()
    AWQ_GEMM = auto()


class QuantDtype(Enum):
    INT4 = auto()


class IPEXWeightOnlyQuantizedLinear:
    @classmethod
    def from_weight(cls, *args: Any, **named: Any) -> None:
        raise NotImplementedError("the stand-in for IPEX serves no quantized models")
