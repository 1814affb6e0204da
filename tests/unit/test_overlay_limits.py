"""What the overlay keeps, for how long, and how much of it it tells."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.overlay_stand_ins.host import Host
from tests.unit.overlay_stand_ins.host import host as host
from tgi_patches.contract import STRICT_VARIABLE
from tgi_patches.hooks import first_token
from tgi_patches.hooks.causal import CausalHooks
from tgi_patches.hooks.flash import FlashHooks
from tgi_patches.hooks.install import _Laid
from tgi_patches.hooks.overlay import Place


def test_results_are_told_once_and_fit_into_grpcs_metadata(host: Host) -> None:
    overlay = host.overlay("d", "FlashCausalLM")
    assert overlay.take_results() == ""
    for request_id in range(2**64 - 500, 2**64):
        overlay.imported(request_id, "tokens_differ")
    told = overlay.take_results()
    assert len(told) < 8192
    assert len(json.loads(told)) == 100
    assert overlay.take_results() == ""


async def test_results_of_a_prefill_that_failed_are_not_told_with_the_next(host: Host) -> None:
    overlay = host.overlay("d", "FlashCausalLM")
    laid = _Laid(Place(overlay.spec, 1, 0, 1), [])
    laid._overlay = overlay
    told: list[Any] = []
    context = SimpleNamespace(set_trailing_metadata=told.append)

    async def fails(*_: Any) -> None:
        overlay.imported(5, "missing")
        raise ValueError("a prompt of another length")

    async def answers(*_: Any) -> str:
        return "reply"

    with pytest.raises(ValueError, match="another length"):
        await laid.prefilled(fails, None, None, context)
    assert await laid.prefilled(answers, None, None, context) == "reply"
    assert told == []


async def test_a_warmup_finds_the_old_cache_let_go(host: Host) -> None:
    """TGI measures the memory that is free once its own references are gone."""
    overlay = host.overlay("d", "FlashCausalLM")
    hooks = FlashHooks(overlay, heads_first=False, request_logprobs=False)
    key, value = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    model = SimpleNamespace(kv_cache=[SimpleNamespace(kv_cache=(key, value))], num_kv_heads=1)
    hooks.arm(model)
    hooks._paged().outbox([0, 1])
    seen = weakref.ref(key)
    laid = _Laid(Place(overlay.spec, 1, 0, 1), [])
    laid._hooks = hooks
    del key, value

    async def warmup(*_: Any) -> str:
        model.kv_cache = []
        gc.collect()
        assert seen() is None
        return "warm"

    assert await laid.warmed_up(warmup, SimpleNamespace(model=model)) == "warm"


def test_a_cache_of_an_unknown_form_is_looked_at_once_and_is_no_fault(host: Host) -> None:
    overlay = host.overlay("d", "CausalLM")
    hooks = CausalHooks(overlay)
    for _ in range(3):
        hooks.forward(lambda *_: ("logits", None, object()), None, None, None, None)
    overlay.say()
    assert host.report(overlay).faults == 0


@pytest.mark.parametrize("draws_before", [0, 1, 3])
def test_a_sampled_row_draws_its_first_token_with_its_first_number(draws_before: int) -> None:
    """TGI draws for a row in every chunk of its prompt."""
    expected = torch.rand(2, generator=torch.Generator().manual_seed(11))
    sampling = SimpleNamespace(generator=torch.Generator().manual_seed(11), seed=11)
    chooser = SimpleNamespace(choice=SimpleNamespace(sampling_mapping={1: sampling}))
    torch.rand(draws_before, generator=sampling.generator)
    first_token.rewind(chooser, 0)
    first_token.rewind(chooser, 1)
    assert torch.equal(torch.rand(2, generator=sampling.generator), expected)


def test_a_greedy_batch_has_nothing_to_rewind() -> None:
    first_token.rewind(SimpleNamespace(choice=object()), 0)


@pytest.mark.parametrize(("strict", "code"), [("0", 0), ("1", 2)])
def test_an_overlay_that_cannot_be_imported_is_a_line_and_a_stock_server(strict: str, code: int) -> None:
    """As in a container to which xxhash was not added."""
    script = (
        "import sys; sys.modules['xxhash'] = None; "
        "from tgi_patches.entrypoint import text_generation_server as entry; entry._install()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {STRICT_VARIABLE: strict, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert done.stderr.startswith("The overlay cannot be imported and is not laid on: ")
    assert len(done.stderr.splitlines()) == 1
