"""The overlay as it stands here is the one that the last run on a real TGI server was about."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tgi import last_run


def test_the_overlay_has_not_changed_since_it_was_proved_on_a_real_server() -> None:
    proved = json.loads(last_run.FILE.read_text())
    assert proved["tgi_patches"] == last_run.overlay_hash(), (
        "tgi_patches/ has changed: run tests/tgi with TGI_PYTHON set (docs/tgi.md) and commit last_run.json"
    )
    assert proved["tgi"]["version"] == "v3.3.7"
    assert proved["counts"]["passed"] > 0


def test_its_hash_knows_names_and_contents_and_nothing_that_python_compiled(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "b").write_text("two")
    before = last_run.overlay_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert last_run.overlay_hash(tmp_path) == before
    (tmp_path / "a.py").write_text("One")
    changed = last_run.overlay_hash(tmp_path)
    assert changed != before
    (tmp_path / "hooks" / "b").rename(tmp_path / "hooks" / "c")
    assert last_run.overlay_hash(tmp_path) not in (before, changed)


def test_only_a_run_of_every_file_counts() -> None:
    every = sorted(last_run.modules())
    assert "test_overlay_alone.py" in every
    assert last_run.complete(every, deselected=0)
    assert not last_run.complete(every[1:], deselected=0)
    assert not last_run.complete(every, deselected=1)
