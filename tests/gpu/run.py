"""Everything that only a GPU can show, in one run of a few minutes: `python -m tests.gpu.run [--dry]`.

Prints one JSON object; with $OUT set it is also written to $OUT/gpu.json.  Parts are independent: one that
fails is recorded in a sentence and the others go on.  `--dry` goes through everything without a device: what
needs one says so, the rest runs on the CPU over the stand-in for streams.
Needs torch, numpy and xxhash beside this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.gpu import arena, layouts, links, overlap
from tests.gpu.bed import Bed, NoDeviceError

BUDGET_S = 450.0
"""A part that would begin later is left out."""
PARTS: Mapping[str, Callable[[Bed], Any]] = {
    "registration": arena.registration,
    "bandwidth": arena.bandwidth,
    "layouts": layouts.round_trips,
    "pool": layouts.publishing,
    "overlap": overlap.beside_compute,
    "graphs": overlap.after_a_capture,
    "nccl_alone": links.alone,
    "nccl_two_on_one_gpu": links.two_on_one_gpu,
    "embedded_shard": lambda bed: embedded_shard(),
}


def embedded_shard() -> dict[str, str]:
    """What there is to measure of it on a GPU."""
    return {"skipped": "the embedded shard is CPU only: its engine places no tensor on a GPU"}


def conditions(*, dry: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry": dry,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "device": None,
    }
    if torch.cuda.is_available() and not dry:
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["device_bytes"] = properties.total_memory
        found["driver"] = _driver()
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def measured(part: Callable[[Bed], Any], *, dry: bool) -> dict[str, Any]:
    """What a part found, or in a sentence why nothing."""
    started_s = time.perf_counter()
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-", dir=folder) as place, Bed.open(place, dry=dry) as bed:
            found = {"result": part(bed)}
    except NoDeviceError as error:
        found = {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001 - a part that fails is a result, and the others go on
        found = {"failed": f"{type(error).__name__}: {error}"}
    return found | {"took_s": round(time.perf_counter() - started_s, 3)}


def run(*, dry: bool, only: str | None = None, budget_s: float = BUDGET_S) -> dict[str, Any]:
    started_s = time.monotonic()
    report: dict[str, Any] = {"conditions": conditions(dry=dry), "parts": {}}
    for name, part in PARTS.items():
        if only is not None and name != only:
            continue
        if time.monotonic() - started_s > budget_s:
            report["parts"][name] = {"skipped": f"the {budget_s:.0f} s were over"}
            continue
        report["parts"][name] = measured(part, dry=dry)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="no device is touched")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    report = run(dry=options.dry, only=options.only)
    text = json.dumps(report, indent=1)
    sys.stdout.write(f"{text}\n")
    if out := os.environ.get("OUT"):
        (Path(out) / "gpu.json").write_text(f"{text}\n", encoding="utf-8")
    return 1 if any("failed" in part for part in report["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
