"""A shard of several ranks as its servers would leave it: arenas, reports and mail in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tgi_patches.bridge import FirstToken, Record
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Role, ShardSpec
from tgi_patches.mailbox import Mailbox, mailbox_path
from tgi_patches.report import Report, report_path, write_report

EPOCH = 77
RING_BYTES = 1 << 20
HANDLE = "0123456789abcdef" * 2
OTHER = "f" * 32
TOKENS = (5, 6, 7)


def fingerprint(ranks: int) -> Fingerprint:
    return Fingerprint("m", "r", "t", "float32", "float32", 1, 2, 4, tensor_parallel=ranks)


def spec_in(folder: Path, ranks: int = 1, **changes: Any) -> ShardSpec:
    values = {
        "deployment": "dep",
        "shard": "p0",
        "role": Role.PREFILL,
        "model": "/models/m",
        "model_name": "m",
        "arena_dir": str(folder),
        "arena_bytes": RING_BYTES,
        "tensor_parallel": ranks,
        "max_input_tokens": 90,
        "max_total_tokens": 100,
        "max_concurrent_requests": 8,
    }
    return ShardSpec(**values | changes)


def report(rank: int, ranks: int, **changes: Any) -> Report:
    """Of a rank whose records flow."""
    flowing = Report(
        protocol=PROTOCOL_VERSION,
        shard="p0",
        epoch=EPOCH,
        rank=rank,
        world_size=ranks,
        model_class="FlashCausalLM",
        hooked=True,
        armed=True,
        fingerprint=fingerprint(ranks),
        kv_tokens=1000,
        bytes_per_token=32,
        ring_bytes=RING_BYTES,
        record_limit_bytes=RING_BYTES // 4,
    )
    return replace(flowing, **changes)


class Rank:
    """The server process of one rank."""

    def __init__(self, spec: ShardSpec, rank: int, epoch: int = EPOCH) -> None:
        self._spec = spec
        self._rank = rank
        ranks = spec.tensor_parallel
        folder = Path(spec.arena_dir)
        self._bridge = ArenaBridge(
            folder, spec.deployment, spec.shard, rank, epoch, fingerprint(ranks), RING_BYTES, 60.0
        )
        self._mail = Mailbox(mailbox_path(folder, spec.deployment, spec.shard, rank))

    def says(self, **changes: Any) -> None:
        spec = self._spec
        path = report_path(Path(spec.arena_dir), spec.deployment, spec.shard, self._rank)
        write_report(path, report(self._rank, spec.tensor_parallel, shard=spec.shard, **changes))

    def export(self, handle: str = HANDLE, tokens: tuple[int, ...] = TOKENS, first: int = 42) -> Record:
        """16 bytes of K and as many of V per token."""
        plane = [memoryview(bytes(16 * len(tokens)))]
        return self._bridge.export(handle, tokens, FirstToken(first, -0.5), False, [plane, plane])

    def post(self, handle: str = HANDLE) -> None:
        self._mail.published(handle)

    @property
    def mail(self) -> Mailbox:
        return self._mail

    def close(self) -> None:
        self._bridge.close()
        self._mail.close()
