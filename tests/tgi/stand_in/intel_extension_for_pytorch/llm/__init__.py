"""IPEX's functions for language models, under IPEX's names."""

from __future__ import annotations

from . import functional, modules, quantization

__all__ = ["functional", "modules", "quantization"]
