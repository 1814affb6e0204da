"""What a server process says of itself: whole or not at all, whoever reads while it is written."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tgi_patches.contract import Fingerprint
from tgi_patches.report import Report, read_report, report_path, write_report

FINGERPRINT = Fingerprint("smol", "r1", "tok", "bfloat16", "uint8", layers=2, kv_heads=3, head_dim=64)
BARE = Report(protocol=1, shard="p0", epoch=7, rank=1, world_size=2, model_class="FlashCausalLM", hooked=True)
FULL = replace(
    BARE,
    note="why not",
    armed=True,
    fingerprint=FINGERPRINT,
    kv_tokens=4096,
    bytes_per_token=768,
    ring_bytes=65536,
    record_limit_bytes=16384,
    exports={"ok": 3, "layout": 1},
    imports={"hit": 2, "tokens_differ": 5},
    faults=4,
    spent_s=0.25,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p0.1.report"


def test_a_report_stands_beside_the_arena() -> None:
    assert report_path(Path("/run/arenas"), "dep", "p0", 1) == Path("/run/arenas/dep/p0.1.report")


@pytest.mark.parametrize("report", [BARE, FULL], ids=["at start", "armed"])
def test_what_was_written_is_read(report: Report, path: Path) -> None:
    write_report(path, report)
    assert read_report(path) == report


def test_the_later_report_counts_and_nothing_else_is_left(path: Path) -> None:
    write_report(path, BARE)
    write_report(path, FULL)
    assert read_report(path) == FULL
    assert list(path.parent.iterdir()) == [path]


def test_a_report_is_for_its_owner_only(path: Path) -> None:
    write_report(path, FULL)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_reader_sees_the_old_report_or_the_new_one_and_never_a_part(path: Path) -> None:
    """Each is about 40 KB, so that a file written in place would be seen half written."""
    old, new = (replace(FULL, exports={f"{n}{k:040}": k for k in range(800)}) for n in ("old", "new"))
    write_report(path, old)
    seen: list[Report | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(read_report(path))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(60):
        write_report(path, (new, old)[turn % 2])
    done.set()
    reader.join()
    assert len(seen) > 1
    assert all(report in (old, new) for report in seen)


def test_what_a_dead_writer_left_is_replaced(path: Path) -> None:
    path.with_suffix(".report-new").write_text("{" * 10_000)
    write_report(path, FULL)
    assert read_report(path) == FULL


def test_a_link_in_the_way_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("somebody's")
    path.with_suffix(".report-new").symlink_to(target)
    with pytest.raises(OSError):
        write_report(path, FULL)
    assert target.read_text() == "somebody's"


def test_a_folder_that_is_missing_is_the_callers_to_hear(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_report(tmp_path / "absent" / "p0.0.report", FULL)


def test_keys_of_a_newer_overlay_are_ignored(path: Path) -> None:
    write_report(path, FULL)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"invented_later": [1, 2]}))
    assert read_report(path) == FULL


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"{",
        b"\xff\xfe",
        b"{}",
        b'{"protocol": 1}',
        json.dumps(FULL.to_dict()).encode()[:-1],
        json.dumps(FULL.to_dict() | {"note": "x" * 70_000}).encode(),
        json.dumps(FULL.to_dict() | {"fingerprint": {"model": "smol"}}).encode(),
    ],
    ids=["empty", "words", "cut", "bytes", "nothing", "too little", "half", "too large", "half fingerprint"],
)
def test_garbage_is_no_report(text: bytes, path: Path) -> None:
    path.write_bytes(text)
    assert read_report(path) is None


def test_no_file_is_no_report(path: Path) -> None:
    assert read_report(path) is None
    path.mkdir()
    assert read_report(path) is None


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"x"', "[" * 60_000], ids=repr)
def test_json_that_is_no_report_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shard.0.report"
    path.write_text(text)
    assert read_report(path) is None
