"""What a pull server does about strangers, and what is left when a server or a pull has ended: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pull_hosts import (
    EPOCH,
    FINGERPRINT,
    KV_BYTES,
    LIMITS,
    DecodeHost,
    Fault,
    PrefillHost,
    Proxy,
    data_of,
    decode_host,
    handle,
    request,
)
from tests.integration.pull_hosts import away as away
from tests.integration.pull_hosts import prefill as prefill
from tgi_patches.bridge import Reservation
from tgi_patches.pull.wire import Hello, Kind, Request, frame

# --- what a stranger may send --------------------------------------------------------------------

HELLO = frame(Kind.HELLO, Hello(bytes(32), True).pack())
ASK = Request(handle(1), "p", EPOCH, 0, int(FINGERPRINT.digest(), 16), 1000).pack()


async def exchanged(address: str, sent: bytes) -> bytes:
    """All that comes back before the server closes, which it may do with a part unread."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(sent)
    writer.write_eof()
    answer = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(1024):
            answer += data
    writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO[:5],
        HELLO[:20],
        HELLO[:16] + bytes(48),
        frame(Kind.HELLO, Hello(bytes(32), True, version=99).pack()),
        frame(Kind.HELLO, Hello(bytes(32), False).pack()),
        HELLO + frame(Kind.DATA, b""),
        HELLO + frame(Kind.DESCRIBE, b""),
        HELLO + frame(Kind.DESCRIBE, bytes(2000)),
        HELLO + frame(Kind.DESCRIBE, ASK),
        HELLO + frame(Kind.DESCRIBE, ASK + b"0" * 64),
        HELLO + frame(Kind.FETCH, ASK + b"\xff" * 64),
    ],
)
async def test_malformed_input_ends_its_connection_with_one_event(
    prefill: PrefillHost, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.export(1)
    caplog.set_level(logging.INFO)
    async with prefill.serving() as (_, address):
        answer = await exchanged(address, sent)
    events = [record for record in caplog.records if record.name == "tgi_patches.pull"]
    assert [event.getMessage().split()[0] for event in events] == ["pull_refused"]
    assert len(answer) in (0, 64), "no more than a greeting"


async def test_who_says_nothing_is_sent_away(prefill: PrefillHost) -> None:
    async with prefill.serving(limits=replace(LIMITS, step_s=0.1)) as (_, address):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        assert len(await reader.read()) == 64
        writer.close()


# --- nothing is left behind ----------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


async def test_a_stopped_server_leaves_no_connection_task_or_mapping(tmp_path: Path, away: Path) -> None:
    prefill = PrefillHost(tmp_path / "prefill")
    prefill.open()
    prefill.export(1)
    before, tasks = descriptors(), asyncio.all_tasks()
    maps = len(mapped(prefill.folder))
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            assert (await decode.puller.pull(request(address, 1))).found
        idle = [await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2])) for _ in range(3)]
        assert len(mapped(prefill.folder)) == maps + 1
    assert asyncio.all_tasks() == tasks
    for reader, writer in idle:
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert descriptors() == before
    assert len(mapped(prefill.folder)) == maps
    assert mapped(away) == []
    prefill.close()


async def test_a_replaced_arena_is_unmapped_at_the_next_request(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            assert (await decode.puller.pull(request(address, 1))).found
            prefill.close()
            (prefill.folder / "dep" / "p.0.arena").unlink()
            assert ["(deleted)" in line for line in mapped(prefill.folder)] == [True]
            prefill.open()
            prefill.export(2)
            reply = await decode.puller.pull(request(address, 2))
            assert decode.read(reply)[1] == data_of(2)
            assert not any("(deleted)" in line for line in mapped(prefill.folder))


def watched(decode: DecodeHost) -> list[Reservation]:
    """All reservations in the pulled ring from now on."""
    rings = decode.puller._rings.current
    assert rings is not None
    reserve, made = rings.bridges[0].reserve, list[Reservation]()

    def reserving(*arguments: Any, **options: Any) -> Reservation:
        made.append(reserve(*arguments, **options))
        return made[-1]

    rings.bridges[0].reserve = reserving  # type: ignore[method-assign]
    return made


async def test_a_cancelled_pull_leaves_no_task_socket_or_reservation(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    prefill.export(2)
    stalled = Fault(at=500_000, until=asyncio.Event())
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away) as decode:
                assert (await decode.puller.pull(request(address, 2))).found
                made = watched(decode)
                pulling = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                assert ([one.valid for one in made], decode.open_bytes) == ([True], KV_BYTES)
                pulling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pulling
                assert ([one.valid for one in made], decode.open_bytes) == ([False], 0)
                assert decode.puller._under_way == {}
                others = [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
                assert not [text for text in others if "Puller" in text or "Transfer" in text]
                assert decode.read(await decode.puller.pull(request(address, 1)))[1] == data_of(1)
                assert [one.valid for one in made] == [False, False]
