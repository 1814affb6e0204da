"""Attention over a KV cache of blocks: [blocks, heads, block, dim], also as float8."""

from __future__ import annotations

import torch

from .attention import attend, bounds

__all__ = ["PagedAttention"]


class PagedAttention:
    @staticmethod
    def reshape_and_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the rows [tokens, heads, dim] into the slots of the cache."""
        _write(key_cache, key, slot_mapping, k_scale)
        _write(value_cache, value, slot_mapping, v_scale)

    @staticmethod
    def flash_attn_varlen_func(
        output: torch.Tensor,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        max_seqlen_q: int,
        max_seqlens_kv: int,
        scale: float,
        is_causal: bool,
        block_table: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """Packed queries [tokens, heads, dim] against the cached tokens of each one's sequence."""
        _refuse_alibi(alibi_slopes)
        sequences = zip(bounds(cu_seqlens_q), bounds(cu_seqlens_kv), block_table, strict=True)
        for rows, columns, table in sequences:
            tokens = columns.stop - columns.start
            output[rows] = attend(
                query[rows],
                _read(k_cache, table, tokens, k_scale),
                _read(v_cache, table, tokens, v_scale),
                scale,
                causal=is_causal,
                window_left=window_size_left,
                window_right=window_size_right,
                softcap=softcap,
            )

    @staticmethod
    def single_query_cached_kv_attention(
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        head_mapping: torch.Tensor,
        scale: float,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: torch.Tensor | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """One query row a sequence [sequences, heads, dim] against its cached tokens."""
        _refuse_alibi(alibi_slopes)
        for row, (table, tokens) in enumerate(zip(block_tables, context_lens.tolist(), strict=True)):
            keys = _read(key_cache, table, tokens, k_scale)[head_mapping]
            values = _read(value_cache, table, tokens, v_scale)[head_mapping]
            output[row] = attend(query[row, None], keys, values, scale, causal=True)[0]


def _refuse_alibi(slopes: torch.Tensor | None) -> None:
    if slopes is not None:
        raise NotImplementedError("the stand-in for IPEX knows no ALiBi")


def _raw(cache: torch.Tensor) -> torch.Tensor:
    """float8 as its bytes: torch indexes no float8 on a CPU."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    block = cache.shape[2]
    stored = (rows if scale == 1.0 else rows.float() / scale).to(cache.dtype)
    _raw(cache)[slots // block, :, slots % block] = _raw(stored)


def _read(cache: torch.Tensor, table: torch.Tensor, tokens: int, scale: float) -> torch.Tensor:
    """The first `tokens` of a sequence as float32 [heads, tokens, dim]."""
    _, heads, block, dim = cache.shape
    blocks = _raw(cache).index_select(0, table[: -(-tokens // block)]).view(cache.dtype)
    rows = blocks.transpose(0, 1).reshape(heads, -1, dim)[:, :tokens].float()
    return rows if scale == 1.0 else rows * scale
