"""What an orchestrator in a container hands on of its own mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import Bind
from orchestrator.shards.docker.own import OwnContainer, bind_for, own_from, own_id_in

ID = "3f0c" * 16
MOUNTINFO = (
    "811 810 0:94 / / rw - overlay overlay rw\n"
    f"830 811 8:1 /var/lib/docker/containers/{ID}/resolv.conf /etc/resolv.conf rw - ext4 /dev/sda1 rw\n"
)
OWN = OwnContainer(
    "orchestrator",
    ("serving",),
    (Bind("/srv/models", "/data"), Bind("more", "/data/more"), Bind("state", "/var/lib/tgi-orchestrator")),
)


def test_the_own_container_is_known_by_the_files_that_the_engine_mounts(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    assert own_id_in(tmp_path / "mountinfo") == ID
    (tmp_path / "mountinfo").write_text("811 810 0:94 / / rw - ext4 /dev/sda1 rw\n")
    assert own_id_in(tmp_path / "mountinfo") is None
    assert own_id_in(tmp_path / "absent") is None


def test_mounts_and_networks_are_read_of_what_the_engine_tells() -> None:
    told = {
        "Name": "/orchestrator",
        "NetworkSettings": {"Networks": {"serving": {}, "bridge": {}}},
        "Mounts": [
            {"Type": "bind", "Source": "/srv/models", "Destination": "/data", "RW": False},
            {
                "Type": "volume",
                "Name": "state",
                "Source": "/var/lib/docker/volumes/state/_data",
                "Destination": "/s",
            },
            {"Type": "tmpfs", "Source": "", "Destination": "/tmp"},
        ],
    }
    assert own_from(told) == OwnContainer(
        "orchestrator", ("bridge", "serving"), (Bind("/srv/models", "/data"), Bind("state", "/s"))
    )
    assert own_from({"Name": "/bare"}) == OwnContainer("bare", (), ())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/llama", Bind("/srv/models/llama", "/data/llama")),
        ("/data", Bind("/srv/models", "/data")),
        # A part of a volume cannot be mounted: all of it, where it stands here.
        ("/data/more/llama", Bind("more", "/data/more")),
    ],
)
def test_a_path_is_handed_on_from_the_deepest_mount_that_has_it(path: str, expected: Bind) -> None:
    assert bind_for(Path(path), OWN) == expected


def test_outside_of_a_container_a_path_is_what_it_is() -> None:
    assert bind_for(Path("/srv/llama"), None) == Bind("/srv/llama", "/srv/llama")
    assert bind_for(Path("/srv/llama"), None, read_only=False).read_only is False


def test_a_path_that_only_the_own_container_has_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match="cannot get /database/llama: it is in the orchestrator's own container"
    ):
        bind_for(Path("/database/llama"), OWN)
