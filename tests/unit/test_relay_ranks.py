"""Records of shards that split the heads differently, over real arenas and pools: every head arrives."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tgi_patches.bridge import FirstToken
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import Fingerprint, GetTag, PutTag
from tgi_patches.heads import Share, held
from tgi_patches.kv.staged import StagedInbox, StagedPool
from tgi_patches.relay import Outgoing, Relay

HEADS, DIM, BLOCK, BLOCKS = 6, 4, 4, 5
EPOCH = 9
HANDLE = "ab" * 16
PROMPT = [11, 12, 13, 14, 15, 16, 17]
FIRST = FirstToken(3, -0.25)
SLOTS = [4, 5, 6, 7, 16, 17, 18]
RING_BYTES = 1 << 16


class Rank:
    """One rank of a shard: its heads of a KV pool, K = V + 0.5, and its arena."""

    def __init__(
        self,
        folder: Path,
        shard: str,
        rank: int,
        ranks: int,
        *,
        heads_first: bool = False,
        pinned_bytes: int = 0,
    ) -> None:
        self.first, self.after = held(HEADS, ranks, rank)
        shape = (BLOCKS, BLOCK, self.after - self.first, DIM)
        pools = (torch.zeros(shape), torch.zeros(shape))
        self.pools = tuple(pool.transpose(1, 2).contiguous() if heads_first else pool for pool in pools)
        self.heads_first = heads_first
        fingerprint = Fingerprint(
            *("m", "", "tok", "float32", "float32"),
            layers=1,
            kv_heads=HEADS,
            head_dim=DIM,
            tensor_parallel=ranks,
        )
        self.bridge = ArenaBridge(
            folder, "dep", shard, rank, EPOCH, fingerprint, RING_BYTES, 60.0, pinned_bytes=pinned_bytes
        )
        self.pool = StagedPool([self.pools], heads_first=heads_first)
        self.relay = Relay(
            self.bridge,
            published=lambda _: None,
            failed=lambda *_: None,
            warn=lambda *_, **__: None,
            kv_heads=HEADS,
            rank=rank,
            ranks=ranks,
        )

    def rows(self) -> list[Tensor]:
        """K and V as `[slot, head, dim]`."""
        ordered = (pool.transpose(1, 2) if self.heads_first else pool for pool in self.pools)
        return [pool.reshape(BLOCKS * BLOCK, self.after - self.first, DIM) for pool in ordered]

    def fill(self, whole: Tensor) -> None:
        """`whole` is V of all heads, `[tokens, heads, dim]`."""
        for plane, offset in ((0, 0.5), (1, 0.0)):
            values = whole[:, self.first : self.after] + offset
            for token, slot in enumerate(SLOTS):
                block, at = divmod(slot, BLOCK)
                pool = self.pools[plane]
                target = pool[block, :, at] if self.heads_first else pool[block, at]
                target.copy_(values[token])

    def put(self, *, pinned: bool = False) -> None:
        tag = PutTag(HANDLE, pinned=pinned)
        self.relay.put(tag, PROMPT, lambda: Outgoing(self.pool.outbox(SLOTS), FIRST, ended=False))
        assert self.relay.exports == {"pinned" if pinned and self.bridge.pinned_bytes else "ok": 1}

    def get(self, slots: list[int]) -> str:
        def inbox(share: Share) -> StagedInbox:
            return self.pool.inbox(slots, 0, share)

        imported, result = self.relay.get(GetTag(HANDLE, "p", EPOCH), PROMPT, inbox)
        if imported is not None:
            self.rows()[0][slots[-1]].zero_()
            for pool in self.pools:  # what the one-token forward leaves
                block, at = divmod(slots[-1], BLOCK)
                (pool[block, :, at] if self.heads_first else pool[block, at]).fill_(-1.0)
            imported.repair()
        return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


def whole_kv() -> Tensor:
    return torch.arange(len(PROMPT) * HEADS * DIM, dtype=torch.float32).view(len(PROMPT), HEADS, DIM)


@pytest.mark.parametrize(("writers", "readers"), list(itertools.product([1, 2, 3, 6], repeat=2)))
def test_every_rank_has_its_heads_after_an_import(folder: Path, writers: int, readers: int) -> None:
    kv = whole_kv()
    for rank in range(writers):
        writer = Rank(folder, "p", rank, writers, heads_first=rank % 2 == 1)
        writer.fill(kv)
        writer.put()
    slots = [0, 1, 2, 3, 8, 9, 10]
    for rank in range(readers):
        reader = Rank(folder, "d", rank, readers, heads_first=rank % 2 == 0)
        assert reader.get(slots) == "hit"
        k, v = reader.rows()
        assert torch.equal(v[slots], kv[:, reader.first : reader.after])
        assert torch.equal(k[slots], kv[:, reader.first : reader.after] + 0.5)
        untouched = [slot for slot in range(BLOCKS * BLOCK) if slot not in slots]
        assert not v[untouched].any()


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (2, 2), (3, 2)])
def test_a_record_of_which_only_some_ranks_could_pin_their_part_is_a_hit(
    folder: Path, writers: int, readers: int
) -> None:
    """Each looks the handle up in each arena, wherever it lies there."""
    kv = whole_kv()
    parts = []
    for rank in range(writers):
        writer = Rank(folder, "p", rank, writers, pinned_bytes=0 if rank else 8192)
        writer.fill(kv)
        writer.put(pinned=True)
        parts.append(writer.bridge.own_lookup(HANDLE).place.pinned)
    assert parts == [True] + [False] * (writers - 1)
    slots = [0, 1, 2, 3, 8, 9, 10]
    for rank in range(readers):
        reader = Rank(folder, "d", rank, readers)
        assert reader.get(slots) == "hit"
        assert torch.equal(reader.rows()[1][slots], kv[:, reader.first : reader.after])


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_a_part_that_is_missing_or_damaged_is_a_miss_for_whoever_needs_it(
    folder: Path, writers: int, readers: int
) -> None:
    for rank in range(writers - 1):
        writer = Rank(folder, "p", rank, writers)
        writer.fill(whole_kv())
        writer.put()
    last = Rank(folder, "p", writers - 1, writers)
    results = [Rank(folder, "d", rank, readers).get([0, 1, 2, 3, 8, 9, 10]) for rank in range(readers)]
    assert results[-1] == "missing"
    last.fill(whole_kv())
    last.put()
    data = last.bridge._writer.mapping.ring  # type: ignore[union-attr]
    where = bytes(data).find(whole_kv()[:, last.first : last.after].contiguous().numpy().tobytes()[:32])
    data[where] ^= 1
    results = [Rank(folder, "d2", rank, readers).get([0, 1, 2, 3, 8, 9, 10]) for rank in range(readers)]
    assert results[-1] == "checksum"


def test_ranks_that_the_heads_cannot_be_split_over_are_a_layout_miss(folder: Path) -> None:
    writer = Rank(folder, "p", 0, 1)
    writer.fill(whole_kv())
    writer.put()
    reader = Rank(folder, "d", 0, 1)
    reader.relay._ranks = 4
    assert reader.get([0, 1, 2, 3, 8, 9, 10]) == "layout"
