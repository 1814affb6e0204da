"""The script for machines with a GPU goes through all its parts on one without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import run
from tests.gpu.bed import Bed

NEED_A_GPU = {"registration", "bandwidth", "overlap", "graphs", "nccl_alone", "nccl_two_on_one_gpu"}


def test_a_dry_run_says_what_needs_a_gpu_and_does_the_rest_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--dry"])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert run.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    parts = report["parts"]
    assert list(parts) == list(run.PARTS)
    assert {name for name, part in parts.items() if part.get("skipped") == "no CUDA device"} == NEED_A_GPU
    round_trips = [row for row in parts["layouts"]["result"].values() if isinstance(row, dict)]
    assert [row["equal"] for row in round_trips] == [True] * 8
    assert parts["pool"]["result"]["counts"] == {"finished": 6}
    assert "CPU only" in parts["embedded_shard"]["result"]["skipped"]
    assert report["conditions"]["device"] is None


def test_a_part_that_fails_is_a_sentence_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bed: Bed) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(run, "PARTS", {"broken": broken, "fine": lambda bed: 1})
    parts = run.run(dry=True)["parts"]
    assert parts["broken"]["failed"] == "ValueError: no such thing"
    assert parts["fine"]["result"] == 1


def test_a_part_that_would_begin_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PARTS", {"fine": lambda bed: 1})
    assert run.run(dry=True, budget_s=-1.0)["parts"] == {"fine": {"skipped": "the -1 s were over"}}
