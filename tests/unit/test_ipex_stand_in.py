"""The stand-in for IPEX, on which TGI's tests run: every function against its formula in float64."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "tgi" / "stand_in" / "intel_extension_for_pytorch"
NAME = "ipex_stand_in"
"""Another name than IPEX's own, which libraries look for."""
BLOCK = 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def ipex() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location(
        NAME, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    left: int = -1,
    causal: bool = True,
    softcap: float = 0.0,
) -> torch.Tensor:
    """One sequence: rows [rows, heads, dim] that end it, keys and values [columns, kv heads, dim]."""
    out = torch.zeros(query.shape[0], query.shape[1], values.shape[2], dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for row in range(query.shape[0]):
        position = keys.shape[0] - query.shape[0] + row
        first = max(0, position - left) if left >= 0 else 0
        last = position if causal else keys.shape[0] - 1
        for head in range(query.shape[1]):
            weights = []
            for column in range(first, last + 1):
                score = scale * float(query[row, head].double() @ keys[column, head // group].double())
                weights.append(math.exp(softcap * math.tanh(score / softcap) if softcap else score))
            for weight, column in zip(weights, range(first, last + 1), strict=True):
                out[row, head] += weight / sum(weights) * values[column, head // group].double()
    return out


class Cache:
    """Sequences of random keys and values, laid into blocks in no order; all other slots hold NaN."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).tolist()
        self.tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.keys = [rand(length, 2, 8, seed=10 + at).to(dtype) for at, length in enumerate(lengths)]
        self.values = [rand(length, 2, 8, seed=50 + at).to(dtype) for at, length in enumerate(lengths)]
        self.key_cache, self.value_cache = (
            torch.full((len(order), 2, BLOCK, 8), math.nan).to(dtype) for _ in range(2)
        )
        for at, count in enumerate(counts):
            for place in range(count):
                self.tables[at, place] = order.pop()
            for position in range(lengths[at]):
                block, offset = int(self.tables[at, position // BLOCK]), position % BLOCK
                for head in range(2):
                    self.key_cache[block, head, offset] = self.keys[at][position, head]
                    self.value_cache[block, head, offset] = self.values[at][position, head]

    def ask(self, ipex: Any, rows: list[int], chosen: list[int] | None = None, **named: Any) -> torch.Tensor:
        """The packed answer to `rows[i]` query rows at the end of every (chosen) sequence i."""
        chosen = list(range(len(rows))) if chosen is None else chosen
        query = torch.cat([self.query(at, rows[at]) for at in chosen])
        out = torch.full_like(query, math.nan)
        ipex.llm.modules.PagedAttention.flash_attn_varlen_func(
            out,
            query,
            self.key_cache,
            self.value_cache,
            starts([rows[at] for at in chosen]),
            starts([int(self.lengths[at]) for at in chosen]),
            max(rows),
            int(self.lengths.max()),
            0.3,
            True,
            self.tables[chosen],
            None,
            **named,
        )
        return out

    @staticmethod
    def query(at: int, rows: int) -> torch.Tensor:
        return rand(rows, 6, 8, seed=90 + at)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_outside_of_tgi_it_changes_nothing(ipex: Any) -> None:
    assert psutil.virtual_memory.__module__ == "psutil"
    assert f"{NAME}.server" not in sys.modules


def test_reported_free_memory_is_capped_and_never_raised(ipex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = importlib.import_module(f"{NAME}.server")
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=1000))
    server.cap_free_memory(900)
    assert psutil.virtual_memory() == real._replace(available=900)
    server.cap_free_memory(2000)
    assert psutil.virtual_memory().available == 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_turns_pairs_in_place_and_leaves_the_rest(ipex: Any, dtype: torch.dtype) -> None:
    """A pair is a complex number: the halves' (i, i + 2), or the neighbours (2i, 2i + 1)."""
    angles = torch.tensor([[0.0, 0.5], [1.0, -2.0], [3.0, 0.1]])
    sin, cos = angles.sin()[:, None].to(dtype), angles.cos()[:, None].to(dtype)
    turn = torch.complex(cos.double(), sin.double())
    for halves, (first, second) in {True: ([0, 1], [2, 3]), False: ([0, 2], [1, 3])}.items():
        packed = rand(3, 2, 3, 6).to(dtype)
        query, key = packed[:, 0], packed[:, 1]
        before = packed.clone().double()
        ipex.llm.functional.rotary_embedding(query, key, sin, cos, 6, halves)
        pairs = torch.complex(before[..., first], before[..., second]) * turn[:, None]
        expected = before.clone()
        expected[..., first], expected[..., second] = pairs.real, pairs.imag
        torch.testing.assert_close(packed, expected.to(dtype))


@pytest.mark.parametrize("biased", [False, True])
def test_norms_of_a_sum_keep_the_sum_where_it_is_asked_for(ipex: Any, biased: bool) -> None:
    x, add, weight = rand(3, 5), rand(3, 5, seed=1), rand(5, seed=2)
    bias = rand(5, seed=3) if biased else None
    total = (x + add).double()
    shift = 0 if bias is None else bias.double()
    rms = total / ((total**2).sum(-1, keepdim=True) / 5 + 1e-3) ** 0.5 * weight + shift
    centred = total - total.sum(-1, keepdim=True) / 5
    layer = centred / ((centred**2).sum(-1, keepdim=True) / 5 + 1e-3) ** 0.5 * weight + shift
    cases = (ipex.llm.functional.add_rms_norm, rms), (ipex.llm.functional.add_layer_norm, layer)
    for norm, expected in cases:
        for add_back, left in ((True, x + add), (False, add)):
            residual = add.clone()
            torch.testing.assert_close(norm(residual, x, weight, bias, 1e-3, add_back), expected.float())
            assert torch.equal(residual, left)
        alone = norm(None, x + add, weight, bias, 1e-3, False)
        torch.testing.assert_close(alone, expected.float())


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_attend_each_to_itself(ipex: Any, causal: bool) -> None:
    query, key, value = rand(9, 6, 8), rand(9, 2, 8, seed=1), rand(9, 2, 8, seed=2)
    at, out = starts([1, 5, 3]), torch.full((9, 6, 8), math.nan)
    ipex.llm.functional.varlen_attention(
        query, key, value, out, at, at, 5, 5, 0.0, 0.4, False, causal, False, None
    )
    parts = zip(query.split([1, 5, 3]), key.split([1, 5, 3]), value.split([1, 5, 3]), strict=True)
    expected = torch.cat([attention_by_hand(q, k, v, 0.4, causal=causal) for q, k, v in parts])
    torch.testing.assert_close(out, expected.float(), **CLOSE)


@pytest.mark.parametrize(
    ("named", "by_hand"),
    [
        ({}, {}),
        ({"window_size_left": 2, "window_size_right": 0}, {"left": 2}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"softcap": 1.5, "window_size_left": 2, "window_size_right": 0}, {"left": 2, "softcap": 1.5}),
    ],
    ids=["plain", "window", "softcap", "both"],
)
def test_cached_sequences_are_read_through_their_blocks(
    ipex: Any, named: dict[str, Any], by_hand: dict[str, Any]
) -> None:
    """A whole prompt, the rest of one whose prefix is cached, and one decoded token; slots beyond are NaN."""
    cache, rows = Cache([6, 9, 8]), [6, 3, 1]
    expected = [
        attention_by_hand(cache.query(at, rows[at]), cache.keys[at], cache.values[at], 0.3, **by_hand)
        for at in range(3)
    ]
    torch.testing.assert_close(cache.ask(ipex, rows, **named), torch.cat(expected).float(), **CLOSE)


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(ipex: Any) -> None:
    cache, rows = Cache([6, 9, 8]), [6, 3, 1]
    together = cache.ask(ipex, rows).split(rows)
    for at in range(3):
        assert torch.equal(cache.ask(ipex, rows, [at]), together[at])


def test_a_float8_cache_is_attended_to_with_its_scales(ipex: Any) -> None:
    cache = Cache([6, 5], torch.float8_e5m2)
    out = cache.ask(ipex, [2, 1], kv_cache_dtype="fp8_e5m2", k_scale=2.0, v_scale=0.5)
    expected = [
        attention_by_hand(
            cache.query(at, rows), cache.keys[at].float() * 2, cache.values[at].float() / 2, 0.3
        )
        for at, rows in enumerate([2, 1])
    ]
    torch.testing.assert_close(out, torch.cat(expected).float(), **CLOSE)


def test_one_query_row_a_sequence_picks_its_kv_head_by_the_mapping(ipex: Any) -> None:
    cache, query = Cache([6, 9]), rand(2, 4, 8)
    mapping = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    out = torch.full_like(query, math.nan)
    ipex.llm.modules.PagedAttention.single_query_cached_kv_attention(
        out,
        query,
        cache.key_cache,
        cache.value_cache,
        mapping,
        0.3,
        cache.tables,
        cache.lengths,
        BLOCK,
        9,
        None,
    )
    for at in range(2):
        keys, values = cache.keys[at][:, mapping], cache.values[at][:, mapping]
        expected = attention_by_hand(query[at : at + 1], keys, values, 0.3)
        torch.testing.assert_close(out[at : at + 1], expected.float(), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_rows_are_written_into_their_slots_and_nowhere_else(ipex: Any, dtype: torch.dtype) -> None:
    """Slot 9 of blocks of 4 is offset 1 of block 2."""
    packed = rand(3, 2, 2, 8)
    caches = [torch.full((4, 2, BLOCK, 8), 7.0).to(dtype) for _ in range(2)]
    ipex.llm.modules.PagedAttention.reshape_and_cache(
        packed[:, 0], packed[:, 1], *caches, torch.tensor([9, 0, 15])
    )
    for cache, rows in zip(caches, packed.unbind(1), strict=True):
        expected = torch.full((4, 2, BLOCK, 8), 7.0)
        for (block, offset), row in zip([(2, 1), (0, 0), (3, 3)], rows, strict=True):
            expected[block, :, offset] = row
        assert torch.equal(cache.float(), expected.to(dtype).float())


def test_a_scale_divides_what_is_written(ipex: Any) -> None:
    caches = [torch.zeros(1, 2, BLOCK, 8, dtype=torch.float8_e5m2) for _ in range(2)]
    rows = torch.full((1, 2, 8), 3.0)
    ipex.llm.modules.PagedAttention.reshape_and_cache(
        rows, rows, *caches, torch.tensor([2]), "fp8_e5m2", 2.0, 4.0
    )
    assert [cache.float()[0, :, 2].unique().tolist() for cache in caches] == [[1.5], [0.75]]


def test_lora_adds_to_every_row_what_its_own_adapter_says(ipex: Any) -> None:
    """Segments of 2, 1 and 3 rows with adapters 1, none and 0; and the same row by row."""
    lora = ipex.llm.functional
    inputs, lora_a, lora_b = rand(6, 5), rand(2, 3, 5, seed=1), rand(2, 7, 3, seed=2)
    base = rand(6, 7, seed=3)
    of_row = [1, 1, -1, 0, 0, 0]
    expected = base.double()
    for row, adapter in enumerate(of_row):
        if adapter >= 0:
            expected[row] += lora_b[adapter].double() @ (
                0.5 * lora_a[adapter].double() @ inputs[row].double()
            )

    segments = torch.tensor([0, 2, 3]), torch.tensor([2, 1, 3]), torch.tensor([1, -1, 0]), 3, 3
    down, out = torch.zeros(6, 3), base.clone()
    lora.sgmv_shrink(inputs, lora_a, down, *segments, 0.5)
    lora.sgmv_expand(down, lora_b, out, *segments, add_inputs=True)
    torch.testing.assert_close(out, expected.float(), **CLOSE)

    down, out = torch.zeros(6, 3), base.clone()
    lora.bgmv_shrink(inputs, lora_a, down, torch.tensor(of_row), 0.5)
    lora.bgmv_expand(down, lora_b, out, torch.tensor(of_row), add_inputs=True)
    torch.testing.assert_close(out, expected.float(), **CLOSE)


def test_lora_without_adding_replaces_the_rows_that_have_an_adapter(ipex: Any) -> None:
    lora, rows, lora_b = ipex.llm.functional, rand(2, 3), rand(1, 7, 3, seed=2)
    expected = torch.stack([lora_b[0] @ rows[0], torch.full((7,), 9.0)])
    out = torch.full((2, 7), 9.0)
    lora.bgmv_expand(rows, lora_b, out, torch.tensor([0, -1]), add_inputs=False)
    torch.testing.assert_close(out, expected, **CLOSE)
    out = torch.full((2, 7), 9.0)
    lora.sgmv_expand(
        rows, lora_b, out, torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([0, -1]), 2, 1
    )
    torch.testing.assert_close(out, expected, **CLOSE)


def test_what_is_only_a_name_says_so(ipex: Any) -> None:
    with pytest.raises(NotImplementedError, match="no mixture of experts"):
        ipex.llm.modules.GatedMLPMOE(W13=None, W2=None, use_prepack=True)
    linear = ipex.llm.quantization.IPEXWeightOnlyQuantizedLinear
    with pytest.raises(NotImplementedError, match="no quantized models"):
        linear.from_weight(None, quant_method=ipex.llm.quantization.QuantMethod.GPTQ_GEMM)
