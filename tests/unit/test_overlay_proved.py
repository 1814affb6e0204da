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


def test_its_hash_covers_what_a_server_imports_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "tgi_patches"
    files = {
        "__init__.py": "",
        "entrypoint/__init__.py": "",
        "entrypoint/text_generation_server.py": "def main():\n    from tgi_patches.late import one\n",
        "hooks/__init__.py": "import json",
        "hooks/install.py": "from tgi_patches.hooks import log\nimport tgi_patches.kv.staged",
        "hooks/log.py": "import os",
        "kv/__init__.py": "two = 2",
        "kv/staged.py": "",
        "late.py": "one = 1",
        "sidecar/__init__.py": "import asyncio",
        "Dockerfile": "FROM scratch",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = last_run.overlay_hash(folder)
    covered = set(files) - {"sidecar/__init__.py", "Dockerfile"}
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
        assert (last_run.overlay_hash(folder) != before) == (name in covered), name
        (folder / name).write_text(text)
    assert last_run.overlay_hash(folder) == before


def test_what_runs_in_tgis_process_is_found_and_what_runs_beside_it_is_not() -> None:
    found = {
        path.relative_to(last_run.OVERLAY).as_posix()
        for path in last_run.imported(last_run.OVERLAY, last_run.ROOTS)
    }
    assert {
        "contract.py",
        "relay.py",
        "ballot.py",
        "hooks/flash.py",
        "kv/staged.py",
        "bridge/arena.py",
    } <= found
    assert not any(name.startswith(("sidecar/", "pull/")) for name in found)


def test_only_a_run_of_every_file_counts() -> None:
    every = sorted(last_run.modules())
    assert "test_overlay_alone.py" in every
    assert last_run.complete(every, deselected=0)
    assert not last_run.complete(every[1:], deselected=0)
    assert not last_run.complete(every, deselected=1)
