"""A shard's status out of what its ranks report of themselves and what its router answers.  Pure, but for
`Reports`, which reads files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, ShardSpec, StatusReply
from tgi_patches.report import Report, read_report, report_path

GOOD = frozenset({"ok", "pinned", "kept", "hit", "resumed"})
UNSIZED_TOKENS = 16_000
"""Of KV: what TGI's router gives out for a model that cannot size its cache."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """What TGI's router has last said of itself."""

    fault: str = "TGI's router has not answered yet."
    """Why it serves nothing, in a sentence; empty where it serves."""
    limits: Limits | None = None
    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """How this shard's records can be reached, and which it can reach itself."""

    arena_id: str
    pull_port: int = 0
    pull_host: str = ""
    pulls: bool = False


class Reports:
    """The newest report of every rank of one incarnation."""

    def __init__(self, spec: ShardSpec, epoch: int) -> None:
        directory = Path(spec.arena_dir)
        self._paths = [
            report_path(directory, spec.deployment, spec.shard, rank) for rank in range(spec.tensor_parallel)
        ]
        self._spec = spec
        self._epoch = epoch

    def __call__(self) -> list[Report | None]:
        """By rank, as they are now."""
        return [read_report(path) for path in self._paths]

    def fingerprint(self) -> Fingerprint | None:
        """What the shard's arenas hold; None until every rank is armed."""
        reports = self()
        return None if unhooked(self._spec, self._epoch, reports) else _first(reports).fingerprint


def unhooked(spec: ShardSpec, epoch: int, reports: Sequence[Report | None]) -> str:
    """Why records do not flow, in a sentence; empty where every rank's do."""
    for rank, report in enumerate(reports):
        if note := _rank_unhooked(spec, epoch, rank, report):
            return note
    contents = {report.fingerprint.digest() for report in reports if report and report.fingerprint}
    return "The ranks of this shard differ in what they serve." if len(contents) > 1 else ""


def status_of(
    spec: ShardSpec, epoch: int, reports: Sequence[Report | None], router: RouterView, reach: Reach
) -> StatusReply:
    """Sizes are of all ranks together; counts are of records, not of the parts that ranks have of them."""
    note = unhooked(spec, epoch, reports)
    known = [report for report in reports if report and _of_this_incarnation(spec, epoch, report)]
    ranks = len(reports)
    return StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment=spec.deployment,
        shard=spec.shard,
        role=spec.role,
        epoch=epoch,
        fingerprint=next((report.fingerprint for report in known if report.fingerprint), None)
        or _announced(spec),
        limits=router.limits or limits_of(spec),
        kv_tokens=min((report.kv_tokens for report in known), default=0) or _unsized(spec),
        slots=spec.max_concurrent_requests,
        ring_bytes=0 if note else ranks * min(report.ring_bytes for report in known),
        record_limit_bytes=0 if note else ranks * min(report.record_limit_bytes for report in known),
        bytes_per_token=sum(report.bytes_per_token for report in known),
        running=router.running,
        waiting=router.waiting,
        kv_tokens_used=router.kv_tokens_used,
        exports=merged([report.exports for report in known]),
        imports=merged([report.imports for report in known]),
        hooked=not note,
        note=note,
        arena_id=reach.arena_id,
        pull_port=reach.pull_port,
        pull_host=reach.pull_host,
        pulls=reach.pulls,
        relaunch=next((report.relaunch for report in known if report.relaunch), ""),
        pinned_bytes=0 if note else ranks * min(report.pinned_bytes for report in known),
        imported_tokens=max((report.imported_tokens for report in known), default=0),
        recomputed_tokens=max((report.recomputed_tokens for report in known), default=0),
    )


def limits_of(spec: ShardSpec) -> Limits:
    """As ordered, before the router has told its own."""
    return Limits(spec.max_input_tokens, spec.max_total_tokens, spec.max_concurrent_requests)


def _unsized(spec: ShardSpec) -> int:
    """KV tokens of a shard whose server has not told them."""
    return spec.kv_pool_tokens or max(UNSIZED_TOKENS, spec.max_total_tokens, spec.max_batch_prefill_tokens)


def merged(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Counts of whole records: good where every rank's part was, else by what most ranks of one kind say.

    A record of which only some ranks could pin their part is `ok`.
    """
    results = sorted({result for ranks in counts for result in ranks})
    by_result = {result: [ranks.get(result, 0) for ranks in counts] for result in results}
    whole = {result: min(each) if result in GOOD else max(each) for result, each in by_result.items()}
    if "pinned" in whole:
        exported = min(ranks.get("ok", 0) + ranks.get("pinned", 0) for ranks in counts)
        whole["ok"] = exported - whole["pinned"]
    return {result: count for result, count in whole.items() if count or result not in GOOD}


def _rank_unhooked(spec: ShardSpec, epoch: int, rank: int, report: Report | None) -> str:
    if report is None:
        return f"The server of rank {rank} has not reported: it is starting, or runs without the overlay."
    if not _of_this_incarnation(spec, epoch, report) or report.rank != rank:
        return f"The report of rank {rank} is of another incarnation of this shard."
    if not report.hooked:
        return report.note or f"The overlay of rank {rank} gave no reason for being off."
    if report.world_size != spec.tensor_parallel:
        return f"The server runs on {report.world_size} ranks, not on {spec.tensor_parallel}."
    if not report.armed or report.fingerprint is None:
        return f"The server of rank {rank} has not finished its warmup."
    return ""


def _of_this_incarnation(spec: ShardSpec, epoch: int, report: Report) -> bool:
    return (report.shard, report.epoch) == (spec.shard, epoch)


def _first(reports: Sequence[Report | None]) -> Report:
    first = reports[0]
    assert first is not None
    return first


def _announced(spec: ShardSpec) -> Fingerprint:
    """For a shard that forms no pair: what `status` shows of its model."""
    return Fingerprint(
        model=spec.model_name,
        revision=spec.revision,
        tokenizer="",
        dtype=spec.dtype,
        kv_dtype=spec.dtype,
        layers=0,
        kv_heads=0,
        head_dim=0,
        tensor_parallel=spec.tensor_parallel,
    )
