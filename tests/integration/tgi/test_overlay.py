"""The sidecar beside TGI's server: its report, its records and its mail, through files alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.tgi.overlay import Overlay
from orchestrator.errors import ConfigError
from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, MissReason, Role, ShardSpec, new_handle
from tgi_patches.mailbox import Mailbox, mailbox_path
from tgi_patches.report import Report, report_path, write_report
from tgi_patches.sidecar import Sidecar

EPOCH = 7
FINGERPRINT = Fingerprint("m", "r", "t", "float32", "float32", layers=1, kv_heads=1, head_dim=2)
REPORT = Report(
    protocol=PROTOCOL_VERSION,
    shard="prefill-0",
    epoch=EPOCH,
    rank=0,
    world_size=1,
    model_class="FlashCausalLM",
    hooked=True,
    armed=True,
    fingerprint=FINGERPRINT,
)


@pytest.fixture
def spec(tmp_path: Path) -> ShardSpec:
    return ShardSpec(
        deployment="test",
        shard="prefill-0",
        role=Role.PREFILL,
        model="/models/m",
        model_name="m",
        arena_dir=str(tmp_path / "arenas"),
    )


@pytest.fixture
def overlay(spec: ShardSpec) -> Overlay:
    made = Overlay(spec, EPOCH)
    made.prepare()
    return made


def written(spec: ShardSpec, report: Report) -> Path:
    path = report_path(Path(spec.arena_dir), spec.deployment, spec.shard, 0)
    write_report(path, report)
    return path


# --- the report ---


def test_the_newest_report_is_read(spec: ShardSpec, overlay: Overlay) -> None:
    assert overlay.reports() == [None]
    written(spec, REPORT)
    assert overlay.reports() == [REPORT]
    written(spec, replace(REPORT, imports={"hit": 3}))
    (report,) = overlay.reports()
    assert report is not None
    assert report.imports == {"hit": 3}


@pytest.mark.parametrize("changes", [{"epoch": EPOCH - 1}, {"shard": "prefill-1"}, {"armed": False}])
def test_only_an_armed_server_of_this_incarnation_has_a_fingerprint(
    spec: ShardSpec, overlay: Overlay, changes: dict[str, Any]
) -> None:
    written(spec, REPORT)
    assert overlay.reports.fingerprint() == FINGERPRINT
    written(spec, replace(REPORT, **changes))
    assert overlay.reports.fingerprint() is None


def test_what_the_server_wrote_is_removed_after_it(spec: ShardSpec, overlay: Overlay) -> None:
    """By all ranks, the page on which they meet included."""
    ranks = Overlay(replace(spec, tensor_parallel=2), EPOCH)
    folder = written(spec, REPORT).parent
    for name in ("prefill-0.1.report", "prefill-0.0.mailbox", "prefill-0.1.mailbox", "prefill-0.ballot"):
        (folder / name).touch()
    ranks.remove()
    ranks.remove()
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_write_is_refused(spec: ShardSpec) -> None:
    folder = Path(spec.arena_dir)
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="is writable by everyone"):
        Overlay(spec, EPOCH).prepare()


# --- records and mail ---


async def test_a_record_of_the_server_is_found_as_soon_as_it_says_so(
    spec: ShardSpec, overlay: Overlay
) -> None:
    directory = Path(spec.arena_dir)
    server = ArenaBridge(directory, "test", "prefill-0", 0, EPOCH, FINGERPRINT, 1 << 20, 60.0)
    mail = Mailbox(mailbox_path(directory, "test", "prefill-0", 0))
    records = overlay.records(FINGERPRINT)
    sidecar = Sidecar(lambda: pytest.fail("no status is asked for"), records, keep_s=60.0)
    handle, other = new_handle(), new_handle()
    planes = [[memoryview(bytes(range(16)))], [memoryview(bytes(range(16, 32)))]]
    with overlay.listening(sidecar, records):
        waiting = [asyncio.create_task(sidecar.wait(name, 30.0)) for name in (handle, other)]
        await asyncio.sleep(0)  # both have begun
        assert sidecar.waiting == 2
        server.export(handle, (5, 6), FirstToken(9, -0.5), True, planes)
        mail.published(handle)
        mail.failed(other, MissReason.LAYOUT)
        found, lost = await asyncio.gather(*waiting)
    assert (found.found, found.first_token_id, found.ended, found.prompt_tokens) == (True, 9, True, 2)
    assert (lost.found, lost.reason) == (False, "layout")
    for opened in (mail, records, server):
        opened.close()


async def test_a_record_of_an_earlier_server_is_not_this_one_s(spec: ShardSpec, overlay: Overlay) -> None:
    earlier = ArenaBridge(Path(spec.arena_dir), "test", "prefill-0", 0, EPOCH - 1, FINGERPRINT, 1 << 20, 60.0)
    handle = new_handle()
    earlier.export(handle, (5, 6), FirstToken(9, -0.5), False, [[memoryview(bytes(16))]] * 2)
    records = overlay.records(FINGERPRINT)
    sidecar = Sidecar(lambda: pytest.fail("no status is asked for"), records, keep_s=60.0)
    reply = await sidecar.wait(handle, 0.0)
    assert (reply.found, reply.reason) == (False, "epoch")
    records.close()
    earlier.close()
