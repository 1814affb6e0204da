"""A Communicator of CPU tensors over a private gloo group, for tests and hosts without GPUs.

The group is constructed directly and registered nowhere, so it is nobody's default group.  gloo connects and
waits by blocking, and has threads of its own: a thread of ours does the waiting, and an aborted one ends by
gloo's timeout.  That keeps it out of TGI's process, where only `nccl` has a place.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from tgi_patches.contract import ContractError, checked_part
from tgi_patches.transport.link import LinkError

_Job = Callable[[Any], None]


class GlooCommunicator:
    """`where`: a file that both ends can reach; `rank` 0 or 1; `host`: the address to listen at.

    `timeout_s`: gloo's own, after which a thread that was given up ends.
    """

    def __init__(self, where: Path, rank: int, *, host: str = "127.0.0.1", timeout_s: float = 10.0) -> None:
        self._where = where
        self._rank = rank
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._connected = False
        self._pending = 0
        self._error = ""

    def start(self) -> None:
        threading.Thread(target=self._run, name="tgi-orchestrator-gloo", daemon=True).start()

    def poll(self) -> bool:
        self._check()
        return self._connected

    def send(self, tensor: Tensor) -> None:
        def job(group: Any) -> None:
            self._sent(group, torch.tensor([tensor.numel()]))
            self._sent(group, tensor)

        self._begin(job)

    def recv(self, tensor: Tensor) -> None:
        """The size comes first: gloo ends a process that is sent more than it asked for."""

        def job(group: Any) -> None:
            size = torch.zeros(1, dtype=torch.int64)
            self._received(group, size)
            if int(size) != tensor.numel():
                raise LinkError(f"{int(size)} bytes are coming, not {tensor.numel()}")
            self._received(group, tensor)

        self._begin(job)

    def done(self) -> bool:
        self._check()
        return not self._pending

    def abort(self) -> None:
        self._error = self._error or "aborted"
        self._jobs.put(None)
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._where.unlink()

    def _sent(self, group: Any, tensor: Tensor) -> None:
        group.send([tensor], 1 - self._rank, 0).wait(self._timeout)

    def _received(self, group: Any, tensor: Tensor) -> None:
        group.recv([tensor], 1 - self._rank, 0).wait(self._timeout)

    def _begin(self, job: _Job) -> None:
        self._check()
        self._pending += 1
        self._jobs.put(job)

    def _check(self) -> None:
        if self._error:
            raise LinkError(self._error)

    def _run(self) -> None:
        try:
            group = self._group()
            self._connected = True
            while (job := self._jobs.get()) is not None:
                job(group)
                self._pending -= 1
        except (RuntimeError, LinkError) as error:
            self._error = self._error or str(error).partition("\n")[0] or repr(error)

    def _group(self) -> Any:
        distributed: Any = torch._C._distributed_c10d  # nothing public makes a group without registering it
        gloo = distributed.ProcessGroupGloo
        store = distributed.FileStore(str(self._where), 2)
        store.set_timeout(self._timeout)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        return gloo(store, self._rank, 2, options)


class GlooMeeting:
    """A Meeting of processes that share `folder`, such as that of their arenas."""

    def __init__(self, folder: Path, *, timeout_s: float = 10.0) -> None:
        self._folder = folder
        self._timeout_s = timeout_s

    def invite(self) -> str:
        return f"gloo-{secrets.token_hex(16)}"

    def communicator(self, where: str, rank: int) -> GlooCommunicator:
        try:
            name = checked_part(where, "meeting place")
        except ContractError as error:
            raise LinkError(str(error)) from None
        return GlooCommunicator(self._folder / name, rank, timeout_s=self._timeout_s)
