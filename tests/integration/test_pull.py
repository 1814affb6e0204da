"""Records travel from one host's arenas to another's, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop
from xxhash import xxh3_64_intdigest

from tests.integration.pull_hosts import (
    EPOCH,
    FINGERPRINT,
    FIRST,
    KEY,
    KV_BYTES,
    LIMITS,
    MEBIBYTE,
    TOKENS,
    PrefillHost,
    Proxy,
    data_of,
    decode_host,
    handle,
    request,
)
from tests.integration.pull_hosts import away as away
from tests.integration.pull_hosts import prefill as prefill
from tgi_patches.contract import MissReason, PullReply
from tgi_patches.pull.wire import Hello, Kind, frame

OTHER_KEY = b"another key entirely"


async def test_a_pulled_record_is_the_source_s_record(prefill: PrefillHost, away: Path) -> None:
    (source,) = prefill.export(1)
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(address, 1))
            record, data = decode.read(reply)
            assert decode.puller.counts == {"ok": 1}
    assert (reply.found, reply.shard, reply.kv_bytes, reply.reason) == (True, "q.pulled", KV_BYTES, "")
    assert data == data_of(1)
    assert (record.token_ids, record.first, record.ended) == (tuple(range(TOKENS)), FIRST, True)
    assert (record.rows, record.checksums, record.ranks) == (source.rows, source.checksums, 1)


def test_uvloop_carries_it_too(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)

    async def pulled() -> list[bytes]:
        async with prefill.serving() as (_, address):
            with decode_host(away) as decode:
                return decode.read(await decode.puller.pull(request(address, 1)))[1]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(pulled()) == data_of(1)


async def test_all_ranks_are_pulled_or_none_counts(tmp_path: Path, away: Path) -> None:
    prefill = PrefillHost(tmp_path / "prefill", ranks=2)
    prefill.open()
    prefill.export(1)
    prefill.export(2)
    prefill.bridges[1].export(handle(2), [1], FIRST, True, [[memoryview(b"other")]])
    prefill.bridges[0].export(handle(3), [1], FIRST, True, [[memoryview(b"alone")]])
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(address, 1))
            for rank in (0, 1):
                record, data = decode.read(reply, rank)
                assert (record.rank, record.ranks, data) == (rank, 2, data_of(1, rank))
            other = await decode.puller.pull(request(address, 2))
            alone = await decode.puller.pull(request(address, 3))
    prefill.close()
    assert reply.kv_bytes == 2 * KV_BYTES
    assert (other.found, other.reason) == (False, MissReason.RANKS)
    assert (alone.found, alone.reason) == (False, MissReason.MISSING)


async def test_more_ranks_than_before_make_the_arenas_anew(tmp_path: Path, away: Path) -> None:
    """A copy of the same name and number there is not taken for the one that went."""
    one, two = PrefillHost(tmp_path / "one"), PrefillHost(tmp_path / "two", ranks=2, epoch=EPOCH + 1)
    for host in (one, two):
        host.open()
        host.export(1)
    async with one.serving() as (_, address), two.serving() as (_, address_two):
        with decode_host(away) as decode:
            early = await decode.puller.pull(request(address, 1))
            late = await decode.puller.pull(request(address_two, 1, epoch=EPOCH + 1))
            assert [decode.read(late, rank)[1] for rank in (0, 1)] == [data_of(1), data_of(1, 1)]
            again = await decode.puller.pull(request(address, 1))
            assert decode.read(again)[1] == data_of(1)
    one.close()
    two.close()
    assert early.found
    assert early.epoch != late.epoch == again.epoch


async def test_a_record_without_checksums_gets_them_on_the_way(prefill: PrefillHost, away: Path) -> None:
    (source,) = prefill.export(1, checked=False)
    assert source.checksums == ()
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            record, data = decode.read(await decode.puller.pull(request(address, 1)))
    block = 262_144
    assert data == data_of(1)
    assert record.checksums == tuple(
        xxh3_64_intdigest(plane[start : start + block])
        for plane in data_of(1)
        for start in range(0, len(plane), block)
    )


async def test_pulls_of_one_record_share_a_transfer_and_later_ones_find_it(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    async with prefill.serving() as (server, address):
        with decode_host(away) as decode:
            replies = await asyncio.gather(*(decode.puller.pull(request(address, 1)) for _ in range(3)))
            later = await decode.puller.pull(request(address, 1))
            assert decode.puller.counts == {"ok": 4}
        assert server.counts == {"ok": 1}
    assert {(reply.found, reply.epoch) for reply in (*replies, later)} == {(True, later.epoch)}


async def test_a_copy_that_the_pulled_ring_took_back_is_pulled_again(
    prefill: PrefillHost, away: Path
) -> None:
    """4 MiB hold four records of 0.9 MiB."""
    for number in range(1, 6):
        prefill.export(number)
    async with prefill.serving() as (server, address):
        with decode_host(away, pulled_bytes=4 * MEBIBYTE) as decode:
            for number in (1, 2, 3, 4, 5, 1):
                reply = await decode.puller.pull(request(address, number))
                assert decode.read(reply)[1] == data_of(number)
        assert server.counts == {"ok": 6}


async def test_the_same_handle_of_another_incarnation_is_another_record(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            assert (await decode.puller.pull(request(address, 1))).found
            stale = await decode.puller.pull(request(address, 1, epoch=EPOCH + 1))
    assert (stale.found, stale.reason) == (False, MissReason.EPOCH)


async def test_a_copy_of_another_shard_s_record_with_the_same_handle_is_not_taken_for_it(
    tmp_path: Path, prefill: PrefillHost, away: Path
) -> None:
    other = PrefillHost(tmp_path / "other", epoch=EPOCH + 1)
    other.open()
    prefill.export(1)
    planes = [[memoryview(plane)] for plane in data_of(9)]
    other.bridges[0].export(handle(1), range(TOKENS), FIRST, True, planes)
    async with prefill.serving() as (_, address), other.serving() as (_, address_other):
        with decode_host(away) as decode:
            for place, epoch, number in (
                (address, EPOCH, 1),
                (address_other, EPOCH + 1, 9),
                (address, EPOCH, 1),
            ):
                reply = await decode.puller.pull(request(place, 1, epoch=epoch))
                assert decode.read(reply)[1] == data_of(number)
    other.close()


async def test_more_pulls_than_may_run_at_once_wait_for_each_other(prefill: PrefillHost, away: Path) -> None:
    """Two records of 0.9 MiB are half a ring of 4 MiB, so two may be open at a time."""
    for number in range(1, 5):
        prefill.export(number)
    limits = replace(LIMITS, pulls_at_once=1)
    async with prefill.serving(limits=limits) as (_, address):
        with decode_host(away, pulled_bytes=4 * MEBIBYTE) as decode:
            replies = await asyncio.gather(
                *(decode.puller.pull(request(address, number)) for number in range(1, 5))
            )
            assert [decode.read(reply)[1] for reply in replies] == [data_of(n) for n in range(1, 5)]


async def test_a_server_that_is_busy_says_so_and_is_waited_for(prefill: PrefillHost, away: Path) -> None:
    """It has nothing to send for more than two steps."""
    prefill.export(1)
    limits = replace(LIMITS, step_s=0.3, pulls_at_once=1)
    async with prefill.serving(limits=limits) as (server, address):
        with decode_host(away, limits=limits) as decode:
            await server._turns.acquire()
            pulling = asyncio.create_task(decode.puller.pull(request(address, 1)))
            await asyncio.sleep(0.7)
            assert not pulling.done()
            server._turns.release()
            assert decode.read(await pulling)[1] == data_of(1)


@pytest.mark.parametrize(
    ("served", "pulled", "reason"),
    [
        (KEY, OTHER_KEY, MissReason.LINK),
        (KEY, b"", MissReason.UNSUPPORTED),
        (b"", KEY, MissReason.UNSUPPORTED),
    ],
    ids=["wrong", "none", "only here"],
)
async def test_without_the_same_key_nothing_is_learned(
    prefill: PrefillHost,
    away: Path,
    served: bytes,
    pulled: bytes,
    reason: MissReason,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill.export(1)
    async with prefill.serving(key=served) as (_, address):
        with decode_host(away, key=pulled) as decode:
            there = await decode.puller.pull(request(address, 1, key=pulled))
            not_there = await decode.puller.pull(request(address, 2, key=pulled))
            assert not (away / "dep").exists()
    assert (there.found, there.reason, not_there.reason) == (False, reason, reason)
    texts = [record.getMessage() for record in caplog.records]
    assert not any(key.decode() in text for text in texts for key in (KEY, OTHER_KEY))


async def test_without_any_key_both_sides_do_without_proofs(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    async with prefill.serving(key=b"") as (_, address):
        with decode_host(away, key=b"") as decode:
            assert decode.read(await decode.puller.pull(request(address, 1, key=b"")))[1] == data_of(1)


async def test_a_server_that_only_pretends_to_know_the_key_is_not_believed(
    prefill: PrefillHost, away: Path
) -> None:
    """Its greeting is right, and its answer is that of a session with another key."""
    prefill.export(1)

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Kind.WELCOME, Hello(bytes(32), True).pack()))
        await reader.read(10_000)
        writer.write(frame(Kind.MISS, b"\x01" + b"0" * 64))
        await writer.drain()
        writer.close()

    impostor = await asyncio.start_server(pretend, "127.0.0.1", 0)
    async with impostor:
        port = impostor.sockets[0].getsockname()[1]
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(f"127.0.0.1:{port}", 1))
    assert (reply.found, reply.reason) == (False, MissReason.LINK)


async def test_a_request_that_is_not_signed_reaches_nobody(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [])
        async with proxy.listening() as through:
            with decode_host(away) as decode:
                for signature in ("", "0" * 64):
                    forged = replace(request(through, 1), signature=signature)
                    reply = await decode.puller.pull(forged)
                    assert (reply.found, reply.reason) == (False, MissReason.UNSUPPORTED)
                moved = replace(request("127.0.0.1:1", 1), address=through)
                assert (await decode.puller.pull(moved)).reason == MissReason.UNSUPPORTED
        assert proxy.passed == []


async def refusal(prefill: PrefillHost, away: Path, **options: object) -> PullReply:
    """The reply to a pull that differs from a good one in `options`."""
    prefill.export(1)
    made = {name: options.pop(name) for name in ("pulled_bytes", "fingerprint") if name in options}
    number = options.pop("number", 1)
    async with prefill.serving() as (server, address):
        with decode_host(away, **made) as decode:
            reply = await decode.puller.pull(request(address, number, **options))  # type: ignore[arg-type]
            assert decode.puller.counts == {reply.reason: 1}
            assert decode.open_bytes == 0
        assert server.counts == {}
    return reply


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"number": 2}, MissReason.MISSING),
        ({"epoch": EPOCH - 1}, MissReason.EPOCH),
        ({"shard": "p2"}, MissReason.MISSING),
        ({"fingerprint": replace(FINGERPRINT, revision="r2")}, MissReason.FINGERPRINT),
        ({"pulled_bytes": 4 * KV_BYTES - 4096}, MissReason.LAYOUT),
        ({"pulled_bytes": 0}, MissReason.UNSUPPORTED),
    ],
)
async def test_what_cannot_be_pulled_is_a_miss_before_any_data_moves(
    prefill: PrefillHost, away: Path, options: dict[str, object], reason: MissReason
) -> None:
    reply = await refusal(prefill, away, **options)
    assert (reply.found, reply.reason, reply.epoch) == (False, reason, 0)


async def test_an_expired_record_is_missing(prefill: PrefillHost, away: Path) -> None:
    prefill.close()
    prefill.export(1)  # by no rank
    reply = await refusal(prefill, away)
    assert reply.reason == MissReason.MISSING
