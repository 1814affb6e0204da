"""Two ends of a torch.distributed group, gloo or NCCL: one sends what is asked for, the other times it.

torch is loaded when it is asked for.
"""

from __future__ import annotations

import array
import fcntl
import importlib
import os
import re
import socket
import struct
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tgi_patches.peer.look import torch_version

PATIENCE_S = 20.0
STOP, LOAD = 0, -1
"""In place of a number of bytes: the end, and bring new content to the device."""
_SIOCGIFADDR = 0x8915


class NotHere(Exception):
    """What it needs is not in this container; the text says what."""


def check(backend: str) -> None:
    """Raises NotHere."""
    if not torch_version():
        raise NotHere("this image has no torch")
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or not getattr(distributed, f"is_{backend}_available")():
        raise NotHere(f"its torch is built without {backend}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise NotHere("no GPU is visible in the container")


class Group:
    """One of two ranks; `meeting` is host:port of rank 0, `own_host` this end's own address.

    Blocks until the other end is there.  Raises NotHere, RuntimeError.
    """

    def __init__(self, backend: str, rank: int, meeting: str, own_host: str) -> None:
        check(backend)
        self._log = Path(tempfile.mkdtemp()) / "nccl"
        if name := interface_of(own_host):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{self._log}.%p"}
        self._torch: Any = importlib.import_module("torch")
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._device = "cuda:0" if backend == "nccl" else "cpu"
        self._distributed.init_process_group(
            backend,
            init_method=f"tcp://{meeting}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=PATIENCE_S),
        )

    def serve(self, data: memoryview) -> None:
        """Rank 0: send as much of `data` as is asked for, until STOP."""
        host = self._torch.frombuffer(data, dtype=self._torch.uint8)
        there = host.to(self._device)
        asked = self._torch.zeros(1, dtype=self._torch.int64, device=self._device)
        while True:
            self._distributed.recv(asked, 1)
            count = int(asked.item())
            if count == STOP:
                break
            if count == LOAD:
                there.copy_(host)
                self._settle()
            else:
                self._distributed.send(there[:count], 1)
                self._settle()
        self.close()

    def fetch(self, target: memoryview) -> float:
        """Rank 1: seconds from the question to the last byte, which is in `target` afterwards."""
        host = self._torch.frombuffer(target, dtype=self._torch.uint8)
        there = self._torch.empty(len(target), dtype=self._torch.uint8, device=self._device)
        self._ask(LOAD)
        self._settle()
        start = time.perf_counter()
        self._ask(len(target))
        self._distributed.recv(there, 0)
        self._settle()
        seconds = time.perf_counter() - start
        host.copy_(there)
        return seconds

    def stop(self) -> None:
        """Rank 1: the end of both."""
        self._ask(STOP)
        self._settle()
        self.close()

    def close(self) -> None:
        self._distributed.destroy_process_group()

    def ways(self) -> list[str]:
        """What NCCL says that it used between the two."""
        found = [ways_in(path.read_text(errors="replace")) for path in self._log.parent.glob("nccl.*")]
        return sorted(set().union(*found))

    def _ask(self, count: int) -> None:
        self._distributed.send(self._torch.tensor([count], device=self._device), 0)

    def _settle(self) -> None:
        if self._device != "cpu":
            self._torch.cuda.synchronize()


def serve_group(backend: str, meeting: str, own_host: str, data: memoryview) -> None:
    """In a thread of its own; where it fails the other end hears of it by its own deadline."""

    def run() -> None:
        try:
            Group(backend, 0, meeting, own_host).serve(data)
        except (NotHere, RuntimeError, ValueError):
            return

    threading.Thread(target=run, daemon=True).start()


def ways_in(log: str) -> set[str]:
    """Of NCCL's log at INFO: `P2P`, `SHM`, `NET/Socket`, ... of the channels that were made."""
    found = re.findall(r"Channel \S+ ?: \d+\[\S+\] -> \d+\[\S+\] (?:\[\w+\] )?via (\w+)(/\w+)?", log)
    return {kind + (rest if kind == "NET" else "") for kind, rest in found}


def interface_of(host: str) -> str:
    """The interface that has this IPv4 address; empty for none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            asked = array.array("b", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)
            except OSError:  # one without an address
                continue
            if socket.inet_ntoa(asked.tobytes()[20:24]) == host:
                return name
    return ""
