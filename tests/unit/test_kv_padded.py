"""The left-padded cache of TGI's CausalLM: a row out, prompts of several lengths in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tgi_patches.kv.padded import Layers, PaddedInbox, RowShape, joined, outbox

HEADS, DIM = 2, 3
CPU = torch.device("cpu")


def cache(batch: int, length: int, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> Layers:
    """Every value tells where it stands: layer, k or v, row, head, position, dim as decimal digits."""

    def one(layer: int, plane: int) -> Tensor:
        tensor = torch.zeros(batch, HEADS, length, DIM)
        for row in range(batch):
            for head in range(HEADS):
                for position in range(length):
                    for at in range(DIM):
                        digits = (layer, plane, row, head, position, at)
                        tensor[row, head, position, at] = int("".join(map(str, digits)))
        return tensor.to(dtype)

    return [(one(layer, 1), one(layer, 2)) for layer in range(1, layers + 1)]


def floats(run: memoryview) -> list[float]:
    return [float(value) for value in run.cast("f")]


def prompt(tokens: int, number: int) -> PaddedInbox:
    """An inbox that has arrived: plane, prompt and token position stand in every value."""
    inbox = PaddedInbox(RowShape(4, HEADS, DIM, torch.float32), tokens)
    for plane, (run,) in enumerate(inbox.planes):
        values = [plane * 100.0 + number * 10 + token for token in range(tokens) for _ in range(HEADS * DIM)]
        run[:] = array("f", values).tobytes()
    inbox.commit()
    return inbox


def per_position(tensor: Tensor) -> list[list[float]]:
    """`[batch][position]` of a `[batch, heads, length, dim]` whose heads and dims all hold one value."""
    assert (tensor == tensor[:, :1, :, :1]).all()
    return [[float(value) for value in row] for row in tensor[:, 0, :, 0]]


def test_an_outbox_holds_the_rows_last_positions_token_by_token() -> None:
    planes = outbox(cache(batch=3, length=5), row=1, tokens=3)
    assert [len(plane) for plane in planes] == [1] * 4
    assert [floats(run) for (run,) in planes] == [
        [
            float(f"{layer}{plane}1{head}{position}{at}")
            for position in (2, 3, 4)
            for head in range(HEADS)
            for at in range(DIM)
        ]
        for layer in (1, 2)
        for plane in (1, 2)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_outbox_is_raw_bytes(dtype: torch.dtype) -> None:
    layers = cache(batch=2, length=4, layers=1, dtype=dtype)
    layers[0][0][1, 0, 2] = torch.tensor([float("nan"), -0.0, float("inf")])
    (run,), _ = outbox(layers, row=1, tokens=2)
    kept = layers[0][0][1].view(torch.uint8)
    assert bytes(run) == b"".join(bytes(kept[head, at].tolist()) for at in (2, 3) for head in range(HEADS))


def test_an_outbox_is_a_copy() -> None:
    layers = cache(batch=1, length=2, layers=1)
    (run,), _ = outbox(layers, row=0, tokens=2)
    before = bytes(run)
    layers[0][0].zero_()
    assert bytes(run) == before


def test_a_tokens_bytes_count_both_planes_of_every_layer() -> None:
    assert RowShape(planes=4, heads=2, dim=3, dtype=torch.bfloat16).bytes_per_token == 48


def test_prompts_of_different_lengths_are_padded_on_the_left_and_lack_their_last_token() -> None:
    (key, value), (key_2, _) = joined([prompt(4, 1), prompt(1, 2), prompt(2, 3)], CPU)
    assert key.shape == (3, HEADS, 3, DIM)
    assert per_position(key) == [[10, 11, 12], [0, 0, 0], [0, 0, 30]]
    assert per_position(value) == [[110, 111, 112], [0, 0, 0], [0, 0, 130]]
    assert per_position(key_2) == [[210, 211, 212], [0, 0, 0], [0, 0, 230]]


def test_prompts_of_one_token_join_to_a_cache_without_positions() -> None:
    pairs = joined([prompt(1, 1), prompt(1, 2)], CPU)
    assert [[tuple(tensor.shape) for tensor in pair] for pair in pairs] == [[(2, HEADS, 0, DIM)] * 2] * 2


def test_heads_are_not_mixed_up() -> None:
    """Out of one cache and into another: all but the last of the row's positions are where they were."""
    layers = cache(batch=2, length=5)
    inbox = PaddedInbox(RowShape(4, HEADS, DIM, torch.float32), 3)
    for (target,), (sent,) in zip(inbox.planes, outbox(layers, row=1, tokens=3), strict=True):
        target[:] = sent
    for pair, sources in zip(joined([inbox], CPU), layers, strict=True):
        for arrived, source in zip(pair, sources, strict=True):
            assert arrived.tolist() == source[1:, :, 2:4].tolist()


def exported_last(layers: Sequence[Sequence[Tensor]], row: int) -> list[list[list[float]]]:
    return [tensor[row, :, -1].tolist() for pair in layers for tensor in pair]


def test_a_repair_writes_the_newest_position_of_its_row_and_no_other() -> None:
    layers = cache(batch=3, length=4)
    wanted = [[tensor.clone() for tensor in pair] for pair in layers]
    inbox = prompt(3, 5)
    inbox.aim(layers, 1)
    inbox.repair()
    assert exported_last(layers, 1) == [[[plane * 100.0 + 52] * DIM] * HEADS for plane in range(4)]
    for pair, before in zip(layers, wanted, strict=True):
        for tensor, old in zip(pair, before, strict=True):
            old[1, :, -1] = tensor[1, :, -1]
            assert tensor.tolist() == old.tolist()


def test_a_repair_happens_once_and_only_where_it_was_aimed() -> None:
    layers = cache(batch=1, length=4)
    inbox = prompt(3, 5)
    inbox.repair()
    assert exported_last(layers, 0) == exported_last(cache(batch=1, length=4), 0)
    inbox.aim(layers, 0)
    inbox.repair()
    for key, value in layers:
        key.zero_()
        value.zero_()
    inbox.repair()
    assert exported_last(layers, 0) == [[[0.0] * DIM] * HEADS] * 4
