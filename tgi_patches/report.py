"""What a server process with the overlay says of itself, in a file that its sidecar reads.

JSON beside the arena, replaced as a whole, so that a reader sees the old one or the new one and a
sidecar that starts again finds what was counted before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tgi_patches.contract import Fingerprint, Message

_SIZE_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Report(Message):
    """One rank's."""

    protocol: int
    shard: str
    epoch: int
    rank: int
    world_size: int
    model_class: str
    """TGI's class: it falls back to another one silently where a kernel is missing."""
    hooked: bool
    note: str = ""
    """Where not hooked, the reason in a sentence."""
    armed: bool = False
    """Warmup is over, records are exported and imported."""
    fingerprint: Fingerprint | None = None
    kv_tokens: int = 0
    """Tokens the KV cache holds."""
    bytes_per_token: int = 0
    """KV bytes of one token, all layers, this rank's heads."""
    ring_bytes: int = 0
    record_limit_bytes: int = 0
    pinned_bytes: int = 0
    exports: Mapping[str, int] = field(default_factory=dict)
    """As StatusReply's; so are the next three."""
    imports: Mapping[str, int] = field(default_factory=dict)
    faults: int = 0
    """Times that the overlay itself failed, which cost at most a local prefill."""
    imported_tokens: int = 0
    recomputed_tokens: int = 0
    relaunch: str = ""
    """Why this server should be replaced as soon as its requests are done; empty: it should not."""
    spent_s: float = 0.0
    """What the overlay's own work has taken of the server's time, up to the last count."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        known = super(Report, cls).from_dict(raw)
        if isinstance(raw.get("fingerprint"), Mapping):
            return replace(known, fingerprint=Fingerprint(**raw["fingerprint"]))
        return known


def report_path(directory: Path, deployment: str, shard: str, rank: int) -> Path:
    """Beside the arena of the same shard and rank."""
    return directory / deployment / f"{shard}.{rank}.report"


def write_report(path: Path, report: Report) -> None:
    """Replace the file at `path`; its folder must be there.  Raises OSError."""
    new = path.with_suffix(".report-new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(report.to_dict(), file)
    new.replace(path)


def read_report(path: Path) -> Report | None:
    """The report at `path`; None where there is none, or one that cannot be read."""
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(_SIZE_LIMIT_BYTES))
        return Report.from_dict(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
