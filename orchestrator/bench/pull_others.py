"""What others use to move KV between hosts, for comparison: gloo of torch.distributed, and nixl.

Both are loaded when they are asked for, and missing where they are not installed.
"""

from __future__ import annotations

import base64
import importlib
import os
import threading
from datetime import timedelta
from typing import Any

PATIENCE_S = 30.0
STOP = 0


class NotHere(Exception):
    """The library is not installed, or does not work on this machine; the text says which."""


def loaded(name: str) -> Any:
    """Raises NotHere."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NotHere("not installed") from None


def gloo_group(rank: int, host: str, port: int) -> tuple[Any, Any]:
    """(torch, torch.distributed) in a world of two; GLOO_SOCKET_IFNAME says over which interface.

    Raises NotHere.
    """
    torch = loaded("torch")
    distributed = loaded("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise NotHere("not built in")
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=PATIENCE_S),
        )
    except RuntimeError as error:
        raise NotHere(str(error).partition("\n")[0]) from None
    return torch, distributed


def gloo_serve(host: str, port: int, limit_bytes: int) -> None:
    """In a thread of its own: send as many bytes as are asked for, until STOP."""

    def serve() -> None:
        try:
            torch, distributed = gloo_group(0, host, port)
        except NotHere:  # the other side finds out too
            return
        data = torch.ones(limit_bytes, dtype=torch.uint8)
        asked = torch.zeros(1, dtype=torch.int64)
        while True:
            distributed.recv(asked, 1)
            if asked.item() == STOP:
                break
            distributed.send(data[: asked.item()], 1)
        distributed.destroy_process_group()

    threading.Thread(target=serve, daemon=True).start()


class Gloo:
    """The side that receives.  Raises NotHere."""

    def __init__(self, host: str, port: int, limit_bytes: int) -> None:
        self._torch, self._distributed = gloo_group(1, host, port)
        self._data = self._torch.ones(limit_bytes, dtype=self._torch.uint8)

    def receive(self, size: int) -> None:
        self._distributed.send(self._torch.tensor([size]), 0)
        self._distributed.recv(self._data[:size], 0)

    def close(self) -> None:
        self._distributed.send(self._torch.tensor([STOP]), 0)
        self._distributed.destroy_process_group()


class Nixl:
    """One agent over UCX with a registered buffer of `limit_bytes`.  Raises NotHere.

    `UCX_TLS` is set to tcp where it is not set: on one host UCX would share memory instead.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        numpy = loaded("numpy")
        os.environ.setdefault("UCX_TLS", "tcp")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        api = loaded("nixl._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._buffer = numpy.ones(limit_bytes, dtype=numpy.uint8)
        self._address = self._buffer.ctypes.data
        self._agent.register_memory([(self._address, limit_bytes, 0, "")], "DRAM")
        self._peer: Any = ""
        self._theirs = 0

    def offer(self) -> dict[str, Any]:
        """What the reading side has to know."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._address}

    def reach(self, offer: dict[str, Any]) -> None:
        """The side whose buffer `receive` reads."""
        self._peer = self._agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self._theirs = int(offer["address"])

    def receive(self, size: int) -> None:
        """Raises NotHere where it fails."""
        ours = self._agent.get_xfer_descs([(self._address, size, 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(self._theirs, size, 0)], "DRAM")
        transfer = self._agent.initialize_xfer("READ", ours, theirs, self._peer)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise NotHere(f"ended as {state}")

    def close(self) -> None:
        """The agent goes with its process."""
