"""The shards of one host, their records in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.overlay_stand_ins.messages import DEPLOYMENT, EPOCH, RING_BYTES
from tgi_patches.bridge import Bridge
from tgi_patches.bridge.memory import MemoryBridge, MemoryHost
from tgi_patches.contract import Fingerprint, Role, ShardSpec
from tgi_patches.hooks import overlay as overlay_module
from tgi_patches.hooks.overlay import Overlay, Place
from tgi_patches.report import Report, read_report, report_path

OpenBridge = Callable[[str, Fingerprint, int], Bridge]


class Host:
    """The shards of one host, in memory; `bridge` decides what a shard's records go through."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.memory = MemoryHost()
        self.bridge: OpenBridge = self.memory_bridge
        self.pinned_bytes: dict[str, int] = {}
        """By shard, as its overlay asked for them."""

    def memory_bridge(self, shard: str, fingerprint: Fingerprint, ring_bytes: int) -> Bridge:
        pinned_bytes = self.pinned_bytes.get(shard, 0)
        return MemoryBridge(
            self.memory, shard, EPOCH, fingerprint, ring_bytes, 60.0, pinned_bytes=pinned_bytes
        )

    def open(
        self,
        directory: Path,
        deployment: str,
        shard: str,
        rank: int,
        epoch: int,
        fingerprint: Fingerprint,
        arena_bytes: int,
        record_ttl_s: float,
        *,
        pinned_bytes: int,
    ) -> Bridge:
        """In ArenaBridge's place."""
        self.pinned_bytes[shard] = pinned_bytes
        return self.bridge(shard, fingerprint, arena_bytes)

    def overlay(self, shard: str, model_class: str, pinned_bytes: int = 0) -> Overlay:
        spec = ShardSpec(
            DEPLOYMENT,
            shard,
            Role.MIXED,
            "m",
            "m",
            arena_dir=str(self.directory),
            arena_bytes=RING_BYTES,
            pinned_bytes=pinned_bytes,
        )
        return Overlay(Place(spec, EPOCH, 0, 1), model_class)

    def report(self, overlay: Overlay) -> Report:
        """After everything that was counted was written."""
        overlay.flush()
        found = read_report(report_path(self.directory, DEPLOYMENT, overlay.spec.shard, 0))
        assert found is not None
        return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path / "arenas")
    monkeypatch.setattr(overlay_module, "ArenaBridge", made.open)
    return made
