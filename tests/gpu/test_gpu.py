"""On a machine with a GPU: every part of `run` finds what it expects."""

from __future__ import annotations

import pytest

from tests.gpu import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("part", run.PARTS)
def test_every_part_succeeds(part: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    [found] = run.run(dry=False, only=part)["parts"].values()
    assert "failed" not in found, found["failed"]
