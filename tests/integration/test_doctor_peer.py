"""The two ends that doctor runs in containers, as two processes of this host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tgi_patches.peer.control import Control, Refused, order_line, order_of
from tgi_patches.peer.group import interface_of, ways_in
from tgi_patches.peer.look import look, mounted_as, sweep
from tgi_patches.peer.measure import Wanted, measure, received_bytes
from tgi_patches.peer.records import FINGERPRINT, PLANES, record_bytes

pytestmark = pytest.mark.timeout(120)

SIZE = 1 << 20
KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY)
    return path


def arenas(tmp_path: Path, name: str = "arenas") -> Path:
    folder = tmp_path / name
    folder.mkdir(mode=0o770, exist_ok=True)
    return folder


@contextlib.asynccontextmanager
async def giver(folder: Path, key_file: Path) -> AsyncIterator[str]:
    """The other end in a process of its own; its address."""
    told = {
        "arenas": str(folder),
        "name": "test",
        "shard": "giver",
        "key_file": str(key_file),
        "size_bytes": SIZE,
        "host": "127.0.0.1",
    }
    command = [sys.executable, "-m", "tgi_patches.peer", "serve", json.dumps(told)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        line = await asyncio.wait_for(child.stdout.readline(), 30)
        yield f"127.0.0.1:{json.loads(line)['port']}"
    finally:
        child.terminate()
        await asyncio.wait_for(child.wait(), 10)


def wanted(address: str, folder: Path, key_file: Path, *ways: str) -> Wanted:
    return Wanted(address, str(folder), "test", str(key_file), SIZE, 2, list(ways))


async def test_records_come_through_one_arena_and_by_pull(tmp_path: Path, key_file: Path) -> None:
    folder = arenas(tmp_path)
    async with giver(folder, key_file) as address:
        facts = await measure(wanted(address, folder, key_file, "arena", "pull"))
    arena, pull = facts["arena"], facts["pull"]
    assert arena["id"][0] == arena["id"][1]
    assert arena["file"][0] == arena["file"][1] != []
    assert arena["whole"] is True
    assert set(arena["read_s"]) == set(arena["export_s"]) == {"giver", "neighbour"}
    assert pull["whole"] is True
    # a warm-up and two rounds, of a large and a small record each
    assert (pull["pulls"], pull["served"]) == (6, 6)
    assert pull["moved_bytes"] == 3 * (record_bytes(SIZE) + record_bytes(1))
    assert pull["received_bytes"]["lo"] >= pull["moved_bytes"]


async def test_two_folders_are_two_arenas_though_a_pull_still_works(tmp_path: Path, key_file: Path) -> None:
    theirs, ours = arenas(tmp_path, "theirs"), arenas(tmp_path, "ours")
    async with giver(theirs, key_file) as address:
        facts = await measure(wanted(address, ours, key_file, "arena", "pull"))
    arena = facts["arena"]
    assert arena["id"][0] != arena["id"][1]
    assert arena["file"][1] == []
    assert "read_s" not in arena
    assert facts["pull"]["served"] == facts["pull"]["pulls"]


async def test_a_copy_of_an_arena_is_not_the_arena(tmp_path: Path, key_file: Path) -> None:
    """The id alone could have been copied with the folder: the file must be the same one."""
    theirs, ours = arenas(tmp_path, "theirs"), arenas(tmp_path, "ours")
    async with giver(theirs, key_file) as address:
        (ours / "test").mkdir(mode=0o770)
        for name in ("arena-id", "test/giver.0.arena"):
            (ours / name).write_bytes((theirs / name).read_bytes())
            (ours / name).chmod(0o640)
        facts = await measure(wanted(address, ours, key_file, "arena"))
    arena = facts["arena"]
    assert arena["id"][0] == arena["id"][1]
    assert arena["file"][0] != arena["file"][1] != []
    assert "read_s" not in arena


async def test_a_folder_that_everybody_may_write_to_is_told_in_words(tmp_path: Path, key_file: Path) -> None:
    folder = arenas(tmp_path)
    folder.chmod(0o777)
    async with giver(folder, key_file) as address:
        facts = await measure(wanted(address, folder, key_file, "arena", "pull"))
    assert "writable by everyone" in facts["arena"]["error"]
    assert "writable by everyone" in facts["pull"]["error"]


@contextlib.asynccontextmanager
async def forging(address: str) -> AsyncIterator[str]:
    """A way to the other end on which it tells of another content than it has written."""
    host, _, port = address.rpartition(":")

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection(host, int(port))
        while line := await reader.readline():
            on.write(line)
            answer = json.loads(await there.readline())
            writer.write(json.dumps(answer | ({"digest": "0" * 32} if "digest" in answer else {})).encode())
            writer.write(b"\n")
        on.close()
        writer.close()

    async with await asyncio.start_server(between, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_content_that_is_not_what_was_written_is_noticed(tmp_path: Path, key_file: Path) -> None:
    folder = arenas(tmp_path)
    async with giver(folder, key_file) as address, forging(address) as forged:
        one = wanted(forged, folder, key_file, "arena", "pull")
        facts = await asyncio.to_thread(lambda: asyncio.run(measure(one)))
    assert facts["arena"]["whole"] is False
    assert facts["pull"]["whole"] is False


async def test_an_end_that_is_not_there_is_an_error_and_no_traceback(tmp_path: Path, key_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    facts = await measure(wanted(address, arenas(tmp_path), key_file, "arena"))
    assert facts["error"] == f"The other end at {address} does not answer: [Errno 111] Connection refused."


async def test_nobody_gives_orders_without_the_key(tmp_path: Path, key_file: Path) -> None:
    async with giver(arenas(tmp_path), key_file) as address:

        def ask() -> dict[str, Any]:
            with Control(address, b"another key of enough bytes") as control:
                return control.order("hello")

        with pytest.raises(Refused, match="not signed"):
            await asyncio.to_thread(ask)


def test_an_order_is_believed_only_as_it_was_signed() -> None:
    key = KEY.encode()
    line = order_line(key, {"do": "export", "handle": "h"})
    assert order_of(key, line) == {"do": "export", "handle": "h"}
    for forged in (line.replace(b"export", b"pulled"), b"[]\n", b"{}\n", b"\xff\n", b'["{}", 3]\n'):
        with pytest.raises(Refused):
            order_of(key, forged)


async def test_gloo_brings_every_byte_over_the_network(tmp_path: Path, key_file: Path) -> None:
    pytest.importorskip("torch")
    folder = arenas(tmp_path)
    async with giver(folder, key_file) as address:
        one = wanted(address, folder, key_file, "gloo")
        told = json.dumps({name: getattr(one, name) for name in one.__slots__})
        # In a process of its own: a process has one default group.
        command = [sys.executable, "-m", "tgi_patches.peer", "measure", told]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(child.communicate(), 60)
    gloo = json.loads(said)["gloo"]
    assert gloo["whole"] is True
    assert gloo["moved_bytes"] == 3 * record_bytes(SIZE)
    assert gloo["received_bytes"]["lo"] >= gloo["moved_bytes"]


def test_a_record_has_the_shape_that_its_fingerprint_says() -> None:
    assert FINGERPRINT.layers * 2 == PLANES
    assert record_bytes(1) == 2 * 30 * 3 * 64 * 4
    assert record_bytes(SIZE) == 1_013_760  # 22 tokens


def test_a_container_tells_what_it_sees_of_its_arenas(tmp_path: Path) -> None:
    folder = arenas(tmp_path)
    folder.chmod(0o2770)
    seen = look(str(folder))["arenas"]
    assert (seen["there"], seen["kind"], seen["mode"], seen["fault"]) == (True, "", "2770", None)
    missing = look(str(tmp_path / "none"))["arenas"]
    assert missing == {"there": False, "fault": "No such file or directory"}


def test_the_latest_mount_at_a_folder_counts() -> None:
    mounts = "overlay / overlay rw 0 0\n/dev/sda1 /arenas ext4 rw 0 0\ntmpfs /arenas tmpfs rw,size=64m 0 0\n"
    assert mounted_as(Path("/arenas"), mounts) == "tmpfs"
    assert mounted_as(Path("/arena"), mounts) == ""


def test_a_sweep_removes_its_own_folder_alone(tmp_path: Path) -> None:
    for name in ("doctor-1", "demo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.0.arena").touch()
    assert sweep(str(tmp_path), "doctor-1") == {"left": False}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_counters_of_interfaces_are_read_by_name(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo:  100       1    0    0    0     0          0         0      100       1\n"
        "  eth0:16991944   40    0    0    0     0          0         0     2000      12\n"
    )
    assert received_bytes(table) == {"lo": 100, "eth0": 16991944}


def test_nccls_log_says_which_way_it_took() -> None:
    head = "gpu-0:17:42 [0] NCCL INFO "
    p2p = (
        f"{head}Channel 00/0 : 0[0] -> 1[0] via P2P/CUMEM\n{head}Channel 01/0 : 0[0] -> 1[0] via P2P/CUMEM\n"
    )
    assert ways_in(p2p) == {"P2P"}
    assert ways_in(f"{head}Channel 00 : 1[6000] -> 0[5000] via SHM/direct/direct\n") == {"SHM"}
    net = f"{head}Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    assert ways_in(net + p2p) == {"NET/Socket", "P2P"}
    assert ways_in(f"{head}NET/Socket : Using [0]eth0:172.18.0.2<0>\n") == set()


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") == ""
