"""The overlay in one server process: its bridge, counters, report, and the guard around every hook."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tgi_patches.ballot import Ballot, ballot_path
from tgi_patches.bridge import ArenaError
from tgi_patches.bridge.arena import ArenaBridge
from tgi_patches.bridge.files import make_directories
from tgi_patches.contract import (
    PROTOCOL_VERSION,
    TAG_MARK,
    BridgeMiss,
    Fingerprint,
    MissReason,
    ShardSpec,
    Tag,
    parse_tag,
)
from tgi_patches.hooks import log
from tgi_patches.hooks.identity import KVShape
from tgi_patches.mailbox import Mailbox, mailbox_path
from tgi_patches.relay import Relay
from tgi_patches.report import Report, report_path, write_report

T = TypeVar("T")
HEALTH_REQUEST_ID = (1 << 64) - 1
"""TGI's router probes a server that failed with a prefill of this id."""

ARENAS_LIMIT_S = 600.0
"""For all ranks to touch every page of their arenas once."""
RESULTS_MAX = 100
"""About 4 KiB; gRPC's limit is 8."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which shard and rank this process is."""

    spec: ShardSpec
    epoch: int
    rank: int
    world_size: int


class Overlay:
    """Everything the hooks share.  One thread: TGI's event loop."""

    def __init__(self, place: Place, model_class: str) -> None:
        self._place = place
        self._relay: Relay | None = None
        self._arena: ArenaBridge | None = None
        spec, rank = place.spec, place.rank
        directory = Path(spec.arena_dir)
        self._mailbox = Mailbox(mailbox_path(directory, spec.deployment, spec.shard, rank))
        self._report_path = report_path(directory, spec.deployment, spec.shard, rank)
        self._counted = 0
        self._faults = 0
        self._spent_s = 0.0
        self._results: dict[str, str] = {}
        self._report = Report(
            protocol=PROTOCOL_VERSION,
            shard=spec.shard,
            epoch=place.epoch,
            rank=rank,
            world_size=place.world_size,
            model_class=model_class,
            hooked=True,
        )

    @property
    def relay(self) -> Relay:
        """Raises BridgeMiss UNSUPPORTED until armed."""
        if self._relay is None:
            raise BridgeMiss(MissReason.UNSUPPORTED, "the overlay is not armed")
        return self._relay

    @property
    def armed(self) -> bool:
        """Records flow."""
        return self._relay is not None

    @property
    def ring(self) -> tuple[memoryview | None, int]:
        """The own arena's memory and the bytes of its ring, once armed."""
        return (None, 0) if self._arena is None else (self._arena.memory, self._arena.ring_bytes)

    @property
    def spec(self) -> ShardSpec:
        return self._place.spec

    # --- life ---

    def say(self) -> None:
        """Write the report as it is now; what keeps it from being written is logged."""
        try:
            make_directories(self._report_path)
            write_report(self._report_path, self._report)
        except (OSError, ArenaError) as error:
            log.warn("overlay_report_failed", error=str(error))

    def arm(self, fingerprint: Fingerprint, shape: KVShape) -> None:
        """Warmup is over: open the arena and let records flow; without an arena stay unhooked and say so.

        After a later Warmup only the cache is another one.
        """
        if self._relay is not None or not self._report.hooked:
            self._report = replace(self._report, kv_tokens=shape.tokens)
            self.say()
            return
        place, spec = self._place, self._place.spec
        try:
            ballot = self._ballot()
            bridge = self._bridge(fingerprint, ballot)
        except ArenaError as error:
            self.refuse(str(error))
            return
        self._arena = bridge
        self._relay = Relay(
            bridge,
            published=self._mailbox.published,
            failed=self._mailbox.failed,
            warn=log.warn,
            kv_heads=fingerprint.kv_heads,
            rank=place.rank,
            ranks=place.world_size,
            agree=int if ballot is None else ballot.agree,
        )
        self._report = replace(
            self._report,
            armed=True,
            fingerprint=fingerprint,
            kv_tokens=shape.tokens,
            bytes_per_token=shape.bytes_per_token,
            ring_bytes=bridge.ring_bytes,
            record_limit_bytes=bridge.record_limit_bytes,
            pinned_bytes=bridge.pinned_bytes,
        )
        log.info("overlay_armed", shard=spec.shard, model_class=self._report.model_class)
        self.say()

    def _ballot(self) -> Ballot | None:
        """Where this rank meets the others; None for a rank alone."""
        place, spec = self._place, self._place.spec
        if place.world_size == 1:
            return None
        path = ballot_path(Path(spec.arena_dir), spec.deployment, spec.shard)
        make_directories(path)
        return Ballot(path, place.epoch, place.rank, place.world_size)

    def _bridge(self, fingerprint: Fingerprint, ballot: Ballot | None) -> ArenaBridge:
        """This rank's arena.  Raises ArenaError on every rank where one of them has none."""
        place, spec = self._place, self._place.spec
        arguments = (Path(spec.arena_dir), spec.deployment, spec.shard, place.rank, place.epoch)
        try:
            bridge = ArenaBridge(
                *arguments,
                fingerprint,
                spec.arena_bytes,
                spec.record_ttl_s,
                pinned_bytes=spec.pinned_bytes // place.world_size,
            )
        except ArenaError:
            if ballot is not None:
                ballot.agree(0, ARENAS_LIMIT_S)
            raise
        if ballot is not None and not ballot.agree(1, ARENAS_LIMIT_S):
            bridge.close()
            raise ArenaError("Another rank of this shard has no arena.")
        return bridge

    def wants_relaunch(self, reason: str) -> None:
        """Tell whoever launched this server to replace it, and export nothing more; the first reason stays.

        Never raises.
        """
        if self._report.relaunch:
            return
        if self._relay is not None:
            self._relay.distrust(reason)
        self._report = replace(self._report, relaunch=reason)
        log.warn("overlay_wants_relaunch", reason=reason)
        self.say()

    def refuse(self, note: str) -> None:
        """Serve as stock TGI does, and say why."""
        self._report = replace(self._report, hooked=False, note=note)
        log.warn("overlay_not_hooked", reason=note)
        self.say()

    # --- what hooks use ---

    def shielded(self, work: Callable[[], T], otherwise: T) -> T:
        """The result of `work`; `otherwise` if it raises, which is counted and never reaches TGI."""
        started_s = time.perf_counter()
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - nothing of ours may break a batch
            self._faults += 1
            log.warn("overlay_fault", error=repr(error))
            return otherwise
        finally:
            self._spent_s += time.perf_counter() - started_s

    def take_tag(self, request: Any) -> Tag | None:
        """The request's handle; its real adapter is put back into TGI's message."""
        sent: str = request.adapter_id
        if TAG_MARK not in sent:
            return None
        adapter = sent.rpartition(TAG_MARK)[0]
        if adapter:
            request.adapter_id = adapter
        else:
            request.ClearField("adapter_id")
        try:
            return parse_tag(sent) if request.id != HEALTH_REQUEST_ID else None
        except ValueError as error:  # a ContractError, or a number that is none
            self._faults += 1
            log.warn("overlay_bad_handle", error=str(error))
            return None

    def imported(self, request_id: int, result: str) -> None:
        """Remember what became of a get leg's record until the running Prefill answers."""
        self._results[str(request_id)] = result

    def take_results(self) -> str:
        """What `imported` was told since the last call, as JSON; empty for nothing.

        At most RESULTS_MAX of them: gRPC ends a call whose metadata is too long.
        """
        results, self._results = self._results, {}
        return json.dumps(dict(islice(results.items(), RESULTS_MAX))) if results else ""

    def flush(self) -> None:
        """Bring the report up to date if anything was counted."""
        self.shielded(self._flush, None)

    def _flush(self) -> None:
        if self._relay is None:
            return
        exports, imports = self._relay.exports, self._relay.imports
        counted = exports.total() + imports.total() + self._faults
        if counted == self._counted:
            return
        self._counted = counted
        self._report = replace(
            self._report,
            exports=dict(exports),
            imports=dict(imports),
            imported_tokens=self._relay.imported_tokens,
            recomputed_tokens=self._relay.recomputed_tokens,
            faults=self._faults,
            spent_s=self._spent_s,
        )
        self.say()
