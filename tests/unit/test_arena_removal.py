"""Which arena files a deployment may remove."""

from __future__ import annotations

from pathlib import Path

from orchestrator.deployment.arena import remove_arenas
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.arena_id import arena_id
from tgi_patches.contract import Fingerprint

FINGERPRINT = Fingerprint("m", "r", "t", "float32", "float32", 1, 1, 8)


def test_a_file_whose_writer_lives_is_kept_and_others_go(tmp_path: Path) -> None:
    directory = tmp_path / "arenas"
    lives, left = (
        ArenaBridge(directory, "blue", shard, 0, 1, FINGERPRINT, 1 << 16, 60.0) for shard in ("p0", "p1")
    )
    left.close()
    remove_arenas(directory, "blue")
    assert [path.name for path in (directory / "blue").iterdir()] == ["p0.0.arena"]
    lives.close()
    remove_arenas(directory, "blue")
    assert not directory.exists()


def test_the_id_of_an_arena_folder_goes_with_its_last_deployment_unless_shards_may_go_on(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "arenas"
    first = arena_id(directory)
    for deployment in ("blue", "green"):
        ArenaBridge(directory, deployment, "p0", 0, 1, FINGERPRINT, 1 << 16, 60.0).close()
    remove_arenas(directory, "blue")
    assert arena_id(directory) == first
    remove_arenas(directory, "green", keep_id=True)
    assert arena_id(directory) == first
    remove_arenas(directory, "green")
    assert not directory.exists()
