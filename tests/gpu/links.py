"""NCCL through our own communicators: made without blocking, given up, and refused with a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bed import Bed
from tgi_patches.transport.link import Link, LinkError
from tgi_patches.transport.nccl import CudaLane, Nccl, NcclCommunicator, NcclMeeting
from tgi_patches.transport.state import LinkLimits, Phase

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def alone(bed: Bed) -> dict[str, Any]:
    """A world of one: made without blocking and aborted; then a link whose peer never comes."""
    bed.needs_gpu()
    nccl = Nccl.load()
    started_s = time.monotonic()
    comm = nccl.init(0, nccl.new_id(), ranks=1)
    returned_s = time.monotonic() - started_s
    while not nccl.settled(comm):
        if time.monotonic() - started_s > PATIENCE_S:
            raise TimeoutError("NCCL alone was not ready in a minute")
        time.sleep(0.001)
    ready_s = time.monotonic() - started_s
    started_s = time.monotonic()
    nccl.call("ncclCommAbort", comm)
    aborted_s = time.monotonic() - started_s
    torch.ones(1, device=bed.device).add_(1)
    return {
        "version": nccl.version,
        "init_returned_s": returned_s,
        "ready_s": ready_s,
        "abort_s": aborted_s,
        "without_a_peer": _without_a_peer(bed),
    }


def _without_a_peer(bed: Bed) -> dict[str, Any]:
    """A link of two ranks whose other end never comes: its deadline has to abort it."""
    meeting = NcclMeeting(bed.device)
    lost: list[str] = []
    link = Link(LinkLimits(connect_s=2.0), moved=lambda: None, lost=lost.append)
    slowest_s = 0.0
    started_s = time.monotonic()
    link.connect(meeting.communicator(meeting.invite(), 0), started_s)
    while link.phase is Phase.CONNECTING and time.monotonic() - started_s < PATIENCE_S:
        before_s = time.monotonic()
        link.poll(before_s)
        slowest_s = max(slowest_s, time.monotonic() - before_s)
        time.sleep(0.001)
    return {"lost": lost, "after_s": time.monotonic() - started_s, "slowest_call_s": slowest_s}


def two_on_one_gpu(bed: Bed) -> dict[str, Any]:
    """NCCL refuses two ranks on one GPU: both ends must end aborted, with its reason, and soon."""
    bed.needs_gpu()
    id_ = Nccl.load().new_id()
    command = [sys.executable, "-m", "tests.gpu.links"]
    ends = [
        subprocess.Popen(
            [*command, str(rank), id_], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    found: dict[str, Any] = {}
    try:
        for rank, end in enumerate(ends):
            out, err = end.communicate(timeout=PATIENCE_S)
            found[f"rank {rank}"] = json.loads(out) if out else {"died": end.returncode, "said": err[-400:]}
    finally:
        for end in ends:
            end.kill()
    return found


def one_end(rank: int, id_: str) -> dict[str, Any]:
    """One of two processes on the same GPU; a record moves if NCCL lets it after all."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    moved: list[bool] = []
    lost: list[str] = []
    limits = LinkLimits(connect_s=20.0, move_s=10.0)
    link = Link(limits, moved=lambda: moved.append(True), lost=lost.append)
    started_s = time.monotonic()
    tensor = torch.full((1 << 20,), 7 if rank == 0 else 0, dtype=torch.uint8, device=device)
    try:
        link.connect(NcclCommunicator(Nccl.load(), CudaLane(device), id_, rank), started_s)
    except LinkError as error:
        return {"refused": str(error)}
    while not moved and not lost and time.monotonic() - started_s < PATIENCE_S / 2:
        now_s = time.monotonic()
        if link.phase is Phase.READY and link.offer(now_s):
            (link.send if rank == 0 else link.recv)(tensor, now_s)
        link.poll(now_s)
        time.sleep(0.001)
    took_s = time.monotonic() - started_s
    return {"moved": bool(moved), "right": int(tensor[-1]) == 7, "lost": lost, "took_s": took_s}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(one_end(int(sys.argv[1]), sys.argv[2])))
