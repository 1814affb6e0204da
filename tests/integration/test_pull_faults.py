"""What a pull does when the network, the source or the ring lets it down: a miss, never a wrong byte."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.integration.pull_hosts import (
    EPOCH,
    FINGERPRINT,
    FIRST,
    KEY,
    KV_BYTES,
    LIMITS,
    MEBIBYTE,
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
from tgi_patches.contract import MissReason, PullReply
from tgi_patches.pull.puller import Puller
from tgi_patches.pull.source import Offer, Source

HASTY = replace(LIMITS, step_s=0.5)


async def pulled_through(
    prefill: PrefillHost, away: Path, faults: list[Fault], timeout_s: float = 10.0
) -> tuple[PullReply, list[bytes] | None, list[int]]:
    """The reply, the record where one was found, and what each connection carried."""
    prefill.export(1)
    async with prefill.serving(limits=HASTY) as (_, address):
        proxy = Proxy(address, faults)
        async with proxy.listening() as through:
            with decode_host(away, limits=HASTY) as decode:
                reply = await decode.puller.pull(request(through, 1, timeout_s=timeout_s))
                assert decode.open_bytes == 0
                assert decode.puller.counts == {"ok" if reply.found else reply.reason: 1}
                return reply, decode.read(reply)[1] if reply.found else None, proxy.passed


# --- the network ---------------------------------------------------------------------------------


async def test_a_broken_connection_is_resumed_where_it_broke(prefill: PrefillHost, away: Path) -> None:
    """Cut at 600,000 of 900,600 bytes: more than half of the chunks need not come again."""
    reply, data, passed = await pulled_through(prefill, away, [Fault(at=600_000, cut=True)])
    assert (reply.found, data) == (True, data_of(1))
    assert len(passed) == 2
    assert passed[1] < KV_BYTES / 2


async def test_a_stalled_connection_is_given_up_and_resumed(prefill: PrefillHost, away: Path) -> None:
    _, data, passed = await pulled_through(prefill, away, [Fault(at=600_000, until=asyncio.Event())])
    assert data == data_of(1)
    assert len(passed) == 2


async def test_a_connection_that_breaks_twice_is_a_miss(prefill: PrefillHost, away: Path) -> None:
    cut = [Fault(at=600_000, cut=True), Fault(at=5_000, cut=True), Fault()]
    reply, _, passed = await pulled_through(prefill, away, cut)
    assert (reply.found, reply.reason) == (False, MissReason.LINK)
    assert len(passed) == 2


async def test_a_pull_of_several_ranks_is_resumed_once_and_no_more(tmp_path: Path, away: Path) -> None:
    """The second connection carries the rest of rank 0, and breaks within rank 1."""
    prefill = PrefillHost(tmp_path / "two", ranks=2)
    prefill.open()
    cut = [Fault(at=600_000, cut=True), Fault(at=KV_BYTES, cut=True), Fault()]
    reply, _, passed = await pulled_through(prefill, away, cut)
    prefill.close()
    assert (reply.found, reply.reason, len(passed)) == (False, MissReason.LINK, 2)


async def test_nothing_listens_there(away: Path) -> None:
    with decode_host(away) as decode:
        for address in ("127.0.0.1:1", "nonsense", "127.0.0.1:port", "127.0.0.1:99999"):
            reply = await decode.puller.pull(request(address, 1))
            assert (reply.found, reply.reason) == (False, MissReason.LINK)


async def test_a_slow_network_is_waited_for_until_the_deadline(prefill: PrefillHost, away: Path) -> None:
    """0.9 MB at 3 MB/s."""
    _, data, passed = await pulled_through(prefill, away, [Fault(bytes_per_s=3e6)])
    assert (data, len(passed)) == (data_of(1), 1)
    reply, *_ = await pulled_through(
        prefill, away.with_name("again"), [Fault(bytes_per_s=1e5)], timeout_s=0.5
    )
    assert (reply.found, reply.reason) == (False, MissReason.LINK)


async def test_a_bit_that_flips_in_the_data_is_seen(prefill: PrefillHost, away: Path) -> None:
    for number, at in enumerate((100_000, 500_000, 880_000)):
        reply, *_ = await pulled_through(
            prefill, away.with_name(f"decode-{number}"), [Fault(at=at, flip=True)]
        )
        assert (reply.found, reply.reason) == (False, MissReason.CHECKSUM)


async def test_a_bit_that_flips_anywhere_else_never_reaches_a_record(
    prefill: PrefillHost, away: Path
) -> None:
    """The greeting, the description, the answer to the fetch: a miss, or another connection."""
    for number, at in enumerate((3, 20, 70, 100, 400, 1500, 1700)):
        reply, data, _ = await pulled_through(
            prefill, away.with_name(f"decode-{number}"), [Fault(at=at, flip=True)]
        )
        assert data in (None, data_of(1))
        assert reply.reason in ("", MissReason.LINK, MissReason.UNSUPPORTED, MissReason.CHECKSUM)


async def test_a_server_that_restarts_under_way_is_found_again(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    stalled = Fault(at=600_000, until=asyncio.Event(), cut=True)
    with decode_host(away) as decode:
        async with prefill.serving() as (_, address):
            proxy = Proxy(address, [stalled])
            listening = proxy.listening()
            through = await listening.__aenter__()
            pulling = asyncio.create_task(decode.puller.pull(request(through, 1)))
            await stalled.reached.wait()
        port = int(address.rpartition(":")[2])
        async with prefill.serving(port=port) as (server, _):
            assert stalled.until is not None
            stalled.until.set()
            assert decode.read(await pulling)[1] == data_of(1)
            assert server.counts == {"ok": 1}
            await listening.__aexit__(None, None, None)


# --- the source ----------------------------------------------------------------------------------


@dataclass
class Meanwhile:
    """A Source whose shard does something when the `visit`-th chunk has been sent."""

    source: Source
    action: Callable[[], object]
    visit: int = 2
    visits: int = field(default=0, init=False)

    @property
    def shard(self) -> str:
        return self.source.shard

    @property
    def digest(self) -> int:
        return self.source.digest

    def find(self, epoch: int, handle: str, rank: int) -> Offer:
        offer = self.source.find(epoch, handle, rank)

        def check() -> None:
            self.visits += 1
            if self.visits == self.visit:
                self.action()
            offer.check()

        return replace(offer, check=check)

    def close(self) -> None:
        self.source.close()


async def pulled_meanwhile(
    prefill: PrefillHost, away: Path, action: Callable[[], object], *, checked: bool = True
) -> PullReply:
    prefill.export(1, checked=checked)
    source = Meanwhile(prefill.source(), action)
    async with prefill.serving(source=source) as (server, address):
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(address, 1))
            assert decode.open_bytes == 0
    assert source.visits == 2, "it stops at once"
    assert server.counts == {reply.reason: 1}
    return reply


@pytest.mark.parametrize("checked", [True, False])
async def test_a_record_that_is_overwritten_while_it_is_sent_is_a_miss(
    prefill: PrefillHost, away: Path, checked: bool
) -> None:
    """8 MiB hold nine records of 0.9 MiB."""

    def lap() -> None:
        for number in range(2, 12):
            prefill.export(number)

    reply = await pulled_meanwhile(prefill, away, lap, checked=checked)
    assert (reply.found, reply.reason) == (False, MissReason.OVERWRITTEN)


async def test_a_record_that_is_exported_again_while_it_is_sent_is_a_miss(
    prefill: PrefillHost, away: Path
) -> None:
    reply = await pulled_meanwhile(prefill, away, lambda: prefill.export(1))
    assert reply.reason == MissReason.OVERWRITTEN


async def test_a_shard_that_restarts_while_its_record_is_sent_is_a_miss(
    prefill: PrefillHost, away: Path
) -> None:
    reply = await pulled_meanwhile(prefill, away, lambda: prefill.restart(EPOCH + 1))
    assert (reply.found, reply.reason) == (False, MissReason.EPOCH)


async def test_a_record_damaged_in_its_arena_is_a_miss(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    path = prefill.folder / "dep" / "p.0.arena"
    with path.open("r+b") as file:
        place = file.read().index(data_of(1)[1]) + 1000
        file.seek(place)
        file.write(bytes([data_of(1)[1][1000] ^ 1]))
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(address, 1))
    assert (reply.found, reply.reason) == (False, MissReason.CHECKSUM)


async def test_a_record_exported_again_between_two_connections_is_not_mixed(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    stalled = Fault(at=600_000, until=asyncio.Event(), cut=True)
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away) as decode:
                pulling = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                other = [[memoryview(plane)] for plane in data_of(9)]
                prefill.bridges[0].export(handle(1), range(300), FIRST, True, other)
                assert stalled.until is not None
                stalled.until.set()
                reply = await pulling
    assert (reply.found, reply.reason) == (False, MissReason.OVERWRITTEN)


# --- the pulled ring -----------------------------------------------------------------------------


async def test_a_ring_that_goes_past_a_slow_pull_takes_it_no_further(
    prefill: PrefillHost, away: Path
) -> None:
    """4 MiB hold four records: the fifth one takes the first one's place."""
    for number in range(1, 6):
        prefill.export(number)
    stalled = Fault(at=300_000, until=asyncio.Event())
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away, pulled_bytes=4 * MEBIBYTE) as decode:
                slow = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                replies = [await decode.puller.pull(request(address, number)) for number in range(2, 6)]
                assert stalled.until is not None
                stalled.until.set()
                late = await slow
                assert [decode.read(reply)[1] for reply in replies] == [data_of(n) for n in range(2, 6)]
                assert decode.open_bytes == 0
    assert (late.found, late.reason) == (False, MissReason.OVERWRITTEN)


async def test_never_more_than_half_of_the_ring_is_open(prefill: PrefillHost, away: Path) -> None:
    """Of 4 MiB, two records of 0.9 MiB; the third pull has to wait for one of them."""
    for number in (1, 2, 3):
        prefill.export(number)
    stalled = [Fault(at=300_000, until=asyncio.Event()) for _ in range(2)]
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, stalled)
        async with proxy.listening() as through:
            with decode_host(away, pulled_bytes=4 * MEBIBYTE) as decode:
                slow = [asyncio.create_task(decode.puller.pull(request(through, n))) for n in (1, 2)]
                for fault in stalled:
                    await fault.reached.wait()
                refused = await decode.puller.pull(request(address, 3, timeout_s=0.2))
                assert (refused.reason, decode.open_bytes) == (MissReason.LINK, 2 * KV_BYTES)
                for fault in stalled:
                    assert fault.until is not None
                    fault.until.set()
                for number, reply in enumerate(await asyncio.gather(*slow), start=1):
                    assert decode.read(reply)[1] == data_of(number)


async def test_a_pull_beyond_those_at_once_waits_without_a_connection(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    prefill.export(2)
    stalled = Fault(at=300_000, until=asyncio.Event())
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away, limits=replace(LIMITS, pulls_at_once=1)) as decode:
                first = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                second = await decode.puller.pull(request(through, 2, timeout_s=0.1))
                assert (second.reason, len(proxy.passed)) == (MissReason.LINK, 1)
                assert stalled.until is not None
                stalled.until.set()
                assert decode.read(await first)[1] == data_of(1)
                assert (await decode.puller.pull(request(through, 2))).found


async def test_when_the_pull_that_leads_is_cancelled_another_goes_on(
    prefill: PrefillHost, away: Path
) -> None:
    prefill.export(1)
    stalled = Fault(at=300_000, until=asyncio.Event())
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away) as decode:
                lead = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                followers = [asyncio.create_task(decode.puller.pull(request(through, 1))) for _ in range(2)]
                await asyncio.sleep(0)
                lead.cancel()
                for reply in await asyncio.gather(*followers):
                    assert decode.read(reply)[1] == data_of(1)
                assert len(proxy.passed) == 2


async def test_a_puller_that_is_closed_ends_its_pulls(prefill: PrefillHost, away: Path) -> None:
    prefill.export(1)
    stalled = Fault(at=300_000, until=asyncio.Event())
    async with prefill.serving() as (_, address):
        proxy = Proxy(address, [stalled])
        async with proxy.listening() as through:
            with decode_host(away) as decode:
                pulling = asyncio.create_task(decode.puller.pull(request(through, 1)))
                await stalled.reached.wait()
                decode.puller.close()
                assert stalled.until is not None
                stalled.until.set()
                assert (await pulling).reason == MissReason.OVERWRITTEN
                assert (await decode.puller.pull(request(address, 1))).reason == MissReason.UNSUPPORTED


@pytest.fixture
def unsafe(away: Path) -> Path:
    """A folder that everyone may write to, as no arena may be in."""
    away.mkdir()
    away.chmod(0o777)
    return away


async def test_an_arena_that_cannot_be_made_is_a_miss(prefill: PrefillHost, unsafe: Path) -> None:
    prefill.export(1)
    async with prefill.serving() as (_, address):
        with decode_host(unsafe) as decode:
            reply = await decode.puller.pull(request(address, 1))
            assert (reply.found, reply.reason) == (False, MissReason.ERROR)
            os.chmod(unsafe, 0o770)  # noqa: PTH101 - a call that takes no time
            assert decode.read(await decode.puller.pull(request(address, 1)))[1] == data_of(1)


async def test_a_shard_whose_copies_cannot_be_named_pulls_nothing(prefill: PrefillHost, away: Path) -> None:
    """`.pulled` makes 67 characters of 60; a part of a file's name has 64 at most."""
    prefill.export(1)
    async with prefill.serving() as (_, address):
        with closing(Puller(away, "dep", "q" * 60, FINGERPRINT, 8 * MEBIBYTE, 60.0, KEY)) as puller:
            for _ in range(2):
                assert (await puller.pull(request(address, 1))).reason == MissReason.ERROR


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), "soon"])
async def test_a_time_that_is_none_is_a_miss(prefill: PrefillHost, away: Path, timeout_s: float) -> None:
    prefill.export(1)
    async with prefill.serving() as (_, address):
        with decode_host(away) as decode:
            reply = await decode.puller.pull(request(address, 1, timeout_s=timeout_s))
            assert reply.reason in (MissReason.LINK, MissReason.ERROR)
            endless = await decode.puller.pull(request(address, 1, timeout_s=float("inf")))
            assert decode.read(endless)[1] == data_of(1)
