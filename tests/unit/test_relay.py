"""Put and get over a bridge in memory: every failure has a reason, is counted once, and never raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.bridge import Bridge, FirstToken, Planes
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import BridgeMiss, Fingerprint, GetTag, MissReason, PutTag
from tgi_patches.heads import Share
from tgi_patches.relay import Done, Imported, Outgoing, Relay, Reserve, common_prefix, content_ids

FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=1, kv_heads=1, head_dim=4)
HANDLE = "0123456789abcdef" * 2
PROMPT = [5, 6, 7]
KV = [bytes(range(48)), bytes(range(100, 148))]
"""K and V of three tokens with 16 bytes each."""
FIRST = FirstToken(42, -0.5, ((42, -0.5), (43, -1.5)))
RING_BYTES = 65536
TTL_S = 10.0


class Box:
    """An inbox that keeps what arrives, and what it was told."""

    def __init__(self, tokens: int = 3) -> None:
        self.arrived = [bytearray(16 * tokens), bytearray(16 * tokens)]
        self.told: list[str] = []

    @property
    def planes(self) -> Planes:
        return [[memoryview(plane)] for plane in self.arrived]

    def commit(self) -> None:
        self.told.append(f"commit after {bytes(self.arrived[0])[:3]!r}")

    def repair(self) -> None:
        self.told.append("repair")


class Pair:
    """A prefill shard `p` and a decode shard `d` of one host, and what their relays said."""

    def __init__(self) -> None:
        self.host = MemoryHost()
        self.now_ns = 0
        self.said: list[tuple[str, ...]] = []
        self.warned: list[tuple[str, dict[str, str]]] = []
        self.put_bridge = self.bridge("p", RING_BYTES)
        self.put = self.relay(self.put_bridge)
        self.get = self.relay(self.bridge("d", 0))

    def bridge(self, shard: str, ring_bytes: int, **options: Any) -> MemoryBridge:
        fingerprint = options.pop("fingerprint", FINGERPRINT)
        epoch = options.pop("epoch", 1)
        return MemoryBridge(
            self.host, shard, epoch, fingerprint, ring_bytes, TTL_S, clock=lambda: self.now_ns, **options
        )

    def relay(self, bridge: Bridge) -> Relay:
        return Relay(
            bridge,
            published=lambda handle: self.said.append(("published", handle)),
            failed=lambda handle, reason: self.said.append(("failed", handle, str(reason))),
            warn=lambda event, /, **facts: self.warned.append((event, facts)),
        )


@pytest.fixture
def pair() -> Pair:
    return Pair()


def outgoing(kv: Sequence[bytes] = KV) -> Outgoing:
    return Outgoing([[memoryview(bytearray(plane))] for plane in kv], FIRST, ended=False)


def put(relay: Relay, handle: str = HANDLE, kv: Sequence[bytes] = KV) -> None:
    relay.put(PutTag(handle), PROMPT, lambda: outgoing(kv))


def get(
    relay: Relay, box: Box, prompt: Sequence[int] = PROMPT, epoch: int = 1
) -> tuple[Imported | None, str]:
    return relay.get(GetTag(HANDLE, "p", epoch), prompt, lambda _: box)


def test_a_record_that_was_put_is_got_as_a_whole_and_both_are_counted(pair: Pair) -> None:
    box = Box()
    put(pair.put)
    imported, result = get(pair.get, box)
    assert result == "hit"
    assert imported is not None
    assert (imported.first, imported.inboxes, imported.cached_tokens) == (FIRST, (box,), 2)
    assert [bytes(plane) for plane in box.arrived] == KV
    assert box.told == [r"commit after b'\x00\x01\x02'"]
    imported.repair()
    assert box.told[1:] == ["repair"]
    assert (pair.put.exports, pair.put.imports) == ({"ok": 1}, {})
    assert (pair.get.exports, pair.get.imports) == ({}, {"hit": 1})
    assert pair.said == [("published", HANDLE)]
    assert pair.warned == []


def test_a_prompt_may_be_any_sequence(pair: Pair) -> None:
    put(pair.put)
    assert get(pair.get, Box(), (5, 6, 7))[1] == "hit"


@pytest.mark.parametrize("ended", [True, False])
def test_whether_the_request_ended_travels_with_the_record(pair: Pair, ended: bool) -> None:
    pair.put.put(PutTag(HANDLE), PROMPT, lambda: replace(outgoing(), ended=ended))
    assert pair.put_bridge.own_lookup(HANDLE).ended is ended


# --- reasons, as the bridge itself finds them ---


def nothing(pair: Pair) -> None:
    pass


def expired(pair: Pair) -> None:
    put(pair.put)
    pair.now_ns = round(TTL_S * 1e9)


def overwritten(pair: Pair) -> None:
    put(pair.put)
    large = [bytes(RING_BYTES // 8 // 48 * 48)] * 2
    for number in range(4):
        put(pair.put, f"{number:032x}", large)


def restarted(pair: Pair) -> None:
    pair.put_bridge.close()
    put(pair.relay(pair.bridge("p", RING_BYTES, epoch=2)))


def another_model(pair: Pair) -> None:
    pair.put_bridge.close()
    put(pair.relay(pair.bridge("p", RING_BYTES, fingerprint=replace(FINGERPRINT, kv_dtype="float16"))))


def damaged(pair: Pair) -> None:
    put(pair.put)
    pair.put_bridge.damage(HANDLE, 50)


def other_planes(pair: Pair) -> None:
    put(pair.put, kv=[bytes(24), bytes(24)])


def other_tokens(pair: Pair) -> None:
    pair.put.put(PutTag(HANDLE), [5, 6, 8], outgoing)


@pytest.mark.parametrize(
    ("happen", "reason"),
    [
        (nothing, MissReason.MISSING),
        (expired, MissReason.MISSING),
        (overwritten, MissReason.OVERWRITTEN),
        (restarted, MissReason.EPOCH),
        (another_model, MissReason.FINGERPRINT),
        (damaged, MissReason.CHECKSUM),
        (other_planes, MissReason.LAYOUT),
        (other_tokens, MissReason.TOKENS_DIFFER),
    ],
)
def test_a_record_that_cannot_be_used_is_a_miss_with_its_reason(
    pair: Pair, happen: Callable[[Pair], None], reason: MissReason
) -> None:
    happen(pair)
    box = Box()
    assert get(pair.get, box) == (None, str(reason))
    assert pair.get.imports == {str(reason): 1}
    assert box.told == []
    ((event, facts),) = pair.warned
    assert (event, facts["handle"], facts["reason"]) == ("kv_import_missed", HANDLE, str(reason))


@pytest.mark.parametrize("prompt", [[5, 6], [5, 6, 7, 7], [7, 6, 5], []])
def test_one_token_of_difference_opens_no_inbox(pair: Pair, prompt: list[int]) -> None:
    put(pair.put)
    opened: list[Box] = []

    def inbox(_: Share) -> Box:
        opened.append(Box())
        return opened[-1]

    assert pair.get.get(GetTag(HANDLE, "p", 1), prompt, inbox) == (None, "tokens_differ")
    assert opened == []


def test_a_shard_without_a_ring_exports_nothing(pair: Pair) -> None:
    put(pair.get)
    assert pair.get.exports == {"unsupported": 1}
    assert pair.said == [("failed", HANDLE, "unsupported")]


def test_a_record_over_the_limit_is_not_exported(pair: Pair) -> None:
    put(pair.put, kv=[bytes(RING_BYTES // 4), bytes(48)])
    assert pair.put.exports == {"layout": 1}
    assert pair.said == [("failed", HANDLE, "layout")]


# --- pinned ---


def pinning(pair: Pair, pinned_bytes: int = 4096) -> Relay:
    """Shard `r`, with room for pinned records; each of this file takes 128 bytes and has 96 of KV."""
    return pair.relay(pair.bridge("r", RING_BYTES, pinned_bytes=pinned_bytes))


def put_pinned(relay: Relay, number: int = 1, kv: Sequence[bytes] = KV) -> None:
    relay.put(PutTag(f"{number:032x}", pinned=True), PROMPT, lambda: outgoing(kv))


def put_later(relay: Relay, number: int = 1, kv: Sequence[bytes] = KV) -> None:
    """The other way out: the bytes arrive in a place that was reserved."""

    def start(reserve: Reserve, done: Done) -> None:
        reservation = reserve([len(plane) for plane in kv])
        reservation.data[:] = b"".join(kv)
        reservation.publish()
        done(None)

    relay.put_later(PutTag(f"{number:032x}", pinned=True), PROMPT, lambda: (FIRST, False), start)


def is_pinned(pair: Pair, number: int = 1) -> bool:
    return pair.bridge("d", 0).lookup("r", 1, f"{number:032x}").place.pinned


WAYS = pytest.mark.parametrize("way", [put_pinned, put_later], ids=["at once", "later"])


@WAYS
def test_a_record_whose_tag_says_so_is_pinned_and_counted_apart(pair: Pair, way: Any) -> None:
    relay = pinning(pair)
    way(relay)
    put(relay)
    assert relay.exports == {"pinned": 1, "ok": 1}
    assert pair.said == [("published", f"{1:032x}"), ("published", HANDLE)]
    assert is_pinned(pair)
    assert pair.warned == []


@WAYS
@pytest.mark.parametrize(
    ("pinned_bytes", "kv", "reason"),
    [(0, KV, "unsupported"), (4096, [bytes(48 * 50)] * 2, "layout")],
    ids=["no region", "larger than the region"],
)
def test_what_cannot_be_pinned_goes_to_the_ring(
    pair: Pair, way: Any, pinned_bytes: int, kv: list[bytes], reason: str
) -> None:
    relay = pinning(pair, pinned_bytes)
    way(relay, kv=kv)
    assert relay.exports == {"ok": 1}
    assert pair.said == [("published", f"{1:032x}")]
    assert not is_pinned(pair)
    ((event, facts),) = pair.warned
    assert (event, facts["handle"], facts["reason"]) == ("kv_not_pinned", f"{1:032x}", reason)


@WAYS
def test_a_full_region_lets_the_next_record_into_the_ring_until_the_first_one_expires(
    pair: Pair, way: Any
) -> None:
    """Records of 3,120 bytes in a region of 4,096."""
    relay, kv = pinning(pair), [bytes(1536)] * 2
    for number in (1, 2):
        way(relay, number, kv)
    assert [is_pinned(pair, number) for number in (1, 2)] == [True, False]
    pair.now_ns = round(TTL_S * 1e9)
    way(relay, 3, kv)
    assert is_pinned(pair, 3)
    assert relay.exports == {"pinned": 2, "ok": 1}


@WAYS
def test_what_fits_nowhere_is_not_exported(pair: Pair, way: Any) -> None:
    relay = pinning(pair)
    way(relay, kv=[bytes(RING_BYTES // 4 // 48 * 48)] * 2)
    assert relay.exports == {"layout": 1}
    assert pair.said == [("failed", f"{1:032x}", "layout")]
    bare = pair.relay(pair.bridge("e", 0))
    way(bare)
    assert bare.exports == {"unsupported": 1}


# --- reasons, as they may come from anywhere ---


class Raising(MemoryBridge):
    """Raises `error` from the verb named `where`, and does the others."""

    where = ""
    error: Exception = RuntimeError()

    def export(self, *args: Any, **kwargs: Any) -> Any:
        self._raise("export")
        return super().export(*args, **kwargs)

    def lookup(self, *args: Any) -> Any:
        self._raise("lookup")
        return super().lookup(*args)

    def read_into(self, *args: Any) -> None:
        self._raise("read_into")
        super().read_into(*args)

    def _raise(self, verb: str) -> None:
        if verb == self.where:
            raise self.error


ERRORS: list[tuple[Exception, str]] = [
    *((BridgeMiss(reason, "said why"), str(reason)) for reason in MissReason),
    (RuntimeError("anything"), "error"),
    (MemoryError(), "error"),
    (ValueError("anything"), "error"),
    (OSError("anything"), "error"),
]


def raising(pair: Pair, where: str, error: Exception) -> Relay:
    bridge = Raising(pair.host, "r", 1, FINGERPRINT, RING_BYTES, TTL_S, clock=lambda: pair.now_ns)
    bridge.where, bridge.error = where, error
    return pair.relay(bridge)


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_an_export_that_fails_is_counted_and_told(pair: Pair, error: Exception, reason: str) -> None:
    relay = raising(pair, "export", error)
    put(relay)
    assert relay.exports == {reason: 1}
    assert pair.said == [("failed", HANDLE, reason)]
    ((event, facts),) = pair.warned
    assert (event, facts["reason"]) == ("kv_export_failed", reason)


@pytest.mark.parametrize("where", ["lookup", "read_into"])
@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_a_read_that_fails_is_counted_and_never_committed(
    pair: Pair, where: str, error: Exception, reason: str
) -> None:
    put(pair.put)
    relay, box = raising(pair, where, error), Box()
    assert get(relay, box) == (None, reason)
    assert relay.imports == {reason: 1}
    assert box.told == []
    assert pair.said == [("published", HANDLE)]


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_kv_that_cannot_be_gathered_is_no_record(pair: Pair, error: Exception, reason: str) -> None:
    def gather() -> NoReturn:
        raise error

    pair.put.put(PutTag(HANDLE), PROMPT, gather)
    assert pair.put.exports == {reason: 1}
    assert pair.said == [("failed", HANDLE, reason)]
    assert get(pair.get, Box()) == (None, "missing")


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_an_inbox_that_cannot_be_opened_is_a_miss(pair: Pair, error: Exception, reason: str) -> None:
    def inbox(_: Share) -> NoReturn:
        raise error

    put(pair.put)
    assert pair.get.get(GetTag(HANDLE, "p", 1), PROMPT, inbox) == (None, reason)
    assert pair.get.imports == {reason: 1}


def test_a_commit_that_fails_is_a_miss(pair: Pair) -> None:
    class Stuck(Box):
        def commit(self) -> None:
            raise RuntimeError("no memory on the device")

    put(pair.put)
    assert get(pair.get, Stuck()) == (None, "error")
    assert pair.get.imports == {"error": 1}


def test_counters_add_up_by_reason(pair: Pair) -> None:
    put(pair.put)
    for prompt in (PROMPT, [1], PROMPT, [2]):
        get(pair.get, Box(), prompt)
    get(pair.get, Box(), epoch=9)
    assert pair.get.imports == {"hit": 2, "tokens_differ": 2, "epoch": 1}


def test_what_the_model_cannot_do_is_counted_by_the_reason_it_gives(pair: Pair) -> None:
    assert (
        pair.get.not_got(GetTag(HANDLE, "p", 1), MissReason.UNSUPPORTED, "prompt logprobs") == "unsupported"
    )
    pair.put.not_put(PutTag(HANDLE), MissReason.UNSUPPORTED, "a beam")
    assert (pair.get.imports, pair.put.exports) == ({"unsupported": 1}, {"unsupported": 1})
    assert pair.said == [("failed", HANDLE, "unsupported")]
    assert [facts["detail"] for _, facts in pair.warned] == ["prompt logprobs", "a beam"]


def test_what_a_record_is_of_depends_on_the_adapter_and_fits_into_32_bits() -> None:
    plain, red, blue = (content_ids([5, 6, 7], adapter) for adapter in ("", "red", "blue"))
    assert plain == (5, 6, 7)
    assert len({plain, red, blue}) == 3
    assert red[1:] == blue[1:] == (6, 7)
    assert all(0 <= ids[0] < 2**32 for ids in (red, blue))
    assert content_ids([], "red") == ()


# --- ranks that decide together ---


def agreeing(pair: Pair, agreed: bool, asked: list[int]) -> Relay:
    """Where the other ranks have found the same (`agreed`), or something else."""

    def agree(number: int) -> int:
        asked.append(number)
        return number if agreed else 0

    return Relay(
        pair.bridge("d2", 0),
        published=lambda _: None,
        failed=lambda *_: None,
        warn=lambda *_, **__: None,
        agree=agree,
    )


def test_what_another_rank_cannot_use_is_not_used(pair: Pair) -> None:
    put(pair.put)
    asked: list[int] = []
    relay = agreeing(pair, False, asked)
    assert get(relay, Box()) == (None, "ranks")
    assert (relay.imports, asked) == ({"ranks": 1}, [3])
    assert (relay.imported_tokens, relay.recomputed_tokens) == (0, 3)


@pytest.mark.parametrize("inbox_fails", [True, False])
def test_a_rank_that_missed_says_so_once_and_keeps_its_own_reason(pair: Pair, inbox_fails: bool) -> None:
    asked: list[int] = []
    relay = agreeing(pair, True, asked)
    if inbox_fails:
        put(pair.put)

        def inbox(_: Share) -> NoReturn:
            raise MemoryError

        assert relay.get(GetTag(HANDLE, "p", 1), PROMPT, inbox) == (None, "error")
    else:
        assert get(relay, Box()) == (None, "missing")
    assert asked == [0]


def test_tokens_are_counted_where_they_came_from(pair: Pair) -> None:
    """The last token of a prompt is computed again on a hit, all of them on a miss."""
    put(pair.put)
    get(pair.get, Box())
    get(pair.get, Box(), epoch=9)
    assert (pair.get.imported_tokens, pair.get.recomputed_tokens) == (2, 1 + 3)


def test_a_prompt_of_one_token_is_found_as_well(pair: Pair) -> None:
    """Nothing of it is left out of the forward, which is not the same as finding nothing."""
    kv = [[memoryview(bytearray(16))] for _ in range(2)]
    pair.put.put(PutTag(HANDLE), [5], lambda: Outgoing(kv, FIRST, ended=False))
    asked: list[int] = []
    assert get(agreeing(pair, True, asked), Box(1), [5])[1] == "hit"
    assert asked == [1]


def test_nothing_is_exported_out_of_a_cache_that_is_not_trusted(pair: Pair) -> None:
    pair.put.distrust("a step failed")
    put(pair.put)
    pair.put.keep(GET, [5, 6, 7], lambda: [[memoryview(bytearray(48))]] * 2)
    assert pair.put.exports == {"error": 2}
    assert pair.said == [("failed", HANDLE, "error")]
    assert get(pair.get, Box()) == (None, "missing")


# --- long answers ---


def test_ranks_that_have_kept_different_pieces_resume_none(pair: Pair) -> None:
    """One that could not keep its second piece still has its first: the lengths must be the same."""
    asked: list[int] = []
    relay = agreeing(pair, False, asked)
    relay._bridge = kept(pair, [5, 6, 7])._bridge
    assert relay.resume(GET, [5, 6, 7, 8, 9], lambda tokens: Box(tokens)) == (None, "ranks")
    assert asked == [4]


GET = GetTag(HANDLE, "p", 1, first_token_id=42)


def kept(pair: Pair, token_ids: Sequence[int], adapter: str = "") -> Relay:
    """A decode shard that has kept these tokens' KV: 16 bytes of K and of V each, numbered."""
    relay = pair.relay(pair.bridge("d3", RING_BYTES))
    kv = [[memoryview(bytearray(range(16 * len(token_ids))))] for _ in range(2)]
    relay.keep(replace(GET, adapter=adapter), token_ids, lambda: kv)
    return relay


@pytest.mark.parametrize(
    ("longer", "cached"),
    [([5, 6, 7, 8, 9, 10], 5), ([5, 6, 7, 8, 9], 4), ([5, 6, 70, 8, 9, 10], 2), ([5, 6], 1), ([5, 60], 1)],
)
def test_a_long_answer_resumes_with_the_tokens_it_has_in_common(
    pair: Pair, longer: list[int], cached: int
) -> None:
    """One token at least is left to compute: the next one comes out of it."""
    relay = kept(pair, [5, 6, 7, 8, 9])
    box, asked = Box(cached), []

    def inbox(tokens: int) -> Box:
        asked.append(tokens)
        return box

    imported, result = relay.resume(GET, longer, inbox)
    assert result == "resumed"
    assert imported is not None
    assert (imported.first, imported.cached_tokens, asked) == (None, cached, [cached])
    assert bytes(box.arrived[1]) == bytes(range(16 * cached))
    imported.repair()
    assert len(box.told) == 1, "committed; nothing was exported that the next token could be set to"
    assert (relay.imported_tokens, relay.recomputed_tokens) == (cached, len(longer) - cached)
    assert (relay.exports, relay.imports) == ({"kept": 1}, {"resumed": 1})
    assert pair.said == [], "nobody waits for what a shard keeps for itself"


def test_an_answer_that_was_not_kept_is_prefilled(pair: Pair) -> None:
    relay = pair.relay(pair.bridge("d3", RING_BYTES))
    assert relay.resume(GET, [5, 6, 7], lambda _: Box()) == (None, "missing")
    assert relay.imports == {"missing": 1}


def test_other_tokens_and_other_adapters_have_nothing_in_common(pair: Pair) -> None:
    relay = kept(pair, [5, 6, 7])
    assert relay.resume(GET, [50, 6, 7, 8], lambda _: Box()) == (None, "tokens_differ")
    assert relay.resume(replace(GET, adapter="red"), [5, 6, 7, 8], lambda _: Box()) == (None, "tokens_differ")
    red = kept(Pair(), [5, 6, 7], "red")
    assert red.resume(replace(GET, adapter="red"), [5, 6, 7, 8], Box)[1] == "resumed"


def test_a_shard_without_a_ring_keeps_nothing(pair: Pair) -> None:
    assert not pair.get.keeps
    pair.get.keep(GET, [5, 6], lambda: [[memoryview(bytearray(32))]])
    assert pair.get.exports == {"unsupported": 1}


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_keeping_never_raises(pair: Pair, error: Exception, reason: str) -> None:
    def gather() -> NoReturn:
        raise error

    relay = pair.relay(pair.bridge("d3", RING_BYTES))
    relay.keep(GET, [5, 6], gather)
    assert relay.exports == {reason: 1}
    assert pair.said == []


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_the_longest(one: list[int], other: list[int]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
