"""Which steps run as decodes, and that a batch is afterwards what it was, over plain stand-ins.

What TGI's own server does of it is in tests/tgi/test_overlay_graph_joins.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tgi_patches.contract import GetTag, PutTag, Role, ShardSpec, new_handle
from tgi_patches.hooks.graph_joins import VARIABLE, GraphJoins, decodes_only, install, wanted
from tgi_patches.hooks.overlay import Overlay, Place
from tgi_patches.hooks.rows import Row, attach
from tgi_patches.relay import Imported

NO_ADAPTERS = SimpleNamespace(data={})


def hit() -> Row:
    return Row(miss().tag, imported=Imported((), cached_tokens=6))


def miss() -> Row:
    return Row(GetTag(new_handle(), shard="p", epoch=1, first_token_id=5))


def put() -> Row:
    return Row(PutTag(new_handle()))


def batch_of(*rows: Row | None, running: int = 0, lengths: list[int] | None = None) -> Any:
    """New rows, with a handle or without, in front of `running` ones that decode."""
    count = len(rows) + running
    batch = SimpleNamespace(
        requests=[SimpleNamespace(id=i) for i in range(count)],
        prefilling_mask=[True] * len(rows) + [False] * running,
        input_lengths=lengths or [1] * count,
        cu_seqlen_prefill=list(range(count + 1)),
        prefill_head_indices=list(range(count)),
        speculative_ids=None,
    )
    attach(batch, {i: row for i, row in enumerate(rows) if row is not None})
    return batch


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    spec = ShardSpec("dep", "d", Role.DECODE, "m", "m", arena_dir=str(tmp_path))
    return Overlay(Place(spec, 1, 0, 1), "FlashCausalLM")


@pytest.mark.parametrize(
    ("batch", "decodes"),
    [
        (batch_of(hit()), True),
        (batch_of(hit(), hit(), running=3), True),
        (batch_of(hit(), miss()), False),
        (batch_of(hit(), put()), False),
        (batch_of(hit(), None), False),
        (batch_of(None, running=2), False),
        (batch_of(running=2), False),
        (batch_of(hit(), running=1, lengths=[1, 2]), False),
        (batch_of(hit(), lengths=[7]), False),
    ],
    ids=["hit", "hits among running", "miss", "put", "plain", "plain one", "nobody new", "a chunk", "part"],
)
def test_only_imported_prompts_of_one_token_among_running_ones_are_a_decode(
    batch: Any, decodes: bool
) -> None:
    assert decodes_only(batch, NO_ADAPTERS) is decodes


def test_a_decode_speculation_and_adapters_are_left_to_tgi() -> None:
    decoding, speculating = batch_of(hit()), batch_of(hit())
    decoding.cu_seqlen_prefill = None
    speculating.speculative_ids = [[1]]
    assert not decodes_only(decoding, NO_ADAPTERS)
    assert not decodes_only(speculating, NO_ADAPTERS)
    assert not decodes_only(batch_of(hit()), SimpleNamespace(data={"q_proj": {}}))


def test_forward_sees_no_prefill_and_the_batch_has_it_again_afterwards_even_if_it_raised(
    overlay: Overlay,
) -> None:
    seen: list[Any] = []

    def forward(model: Any, batch: Any, adapters: Any) -> str:
        seen.append((batch.cu_seqlen_prefill, batch.prefill_head_indices))
        if model == "broken":
            raise RuntimeError("out of memory")
        return "logits"

    joins = GraphJoins(overlay)
    batch = batch_of(hit())
    assert joins.forward(forward, "model", batch, NO_ADAPTERS) == "logits"
    with pytest.raises(RuntimeError, match="out of memory"):
        joins.forward(forward, "broken", batch, NO_ADAPTERS)
    assert (batch.cu_seqlen_prefill, batch.prefill_head_indices) == ([0, 1], [0])
    assert joins.forward(forward, "model", batch_of(None), NO_ADAPTERS) == "logits"
    assert seen == [(None, None), (None, None), ([0, 1], [0])]
    assert joins.taken == 2


def test_a_batch_of_an_unknown_shape_is_left_to_tgi(overlay: Overlay) -> None:
    joins = GraphJoins(overlay)
    strange = SimpleNamespace(cu_seqlen_prefill=[0, 1])
    assert joins.forward(lambda *args: "logits", "model", strange, NO_ADAPTERS) == "logits"
    assert joins.taken == 0


def test_another_tgi_is_not_wrapped(overlay: Overlay) -> None:
    module = SimpleNamespace(FlashCausalLM=type("FlashCausalLM", (), {"forward": "stock"}))
    assert install(module, overlay) is None
    assert module.FlashCausalLM.forward == "stock"


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert [wanted(env) for env in ({}, {VARIABLE: "0"}, {VARIABLE: "1"})] == [False, False, True]
