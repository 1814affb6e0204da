"""A communicator without a peer: the test says what happens to it."""

from __future__ import annotations

from torch import Tensor

from tgi_patches.transport.link import LinkError


class FakeCommunicator:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tensors: list[Tensor] = []
        self.connected = False
        self.finished = False
        self.error = ""

    def start(self) -> None:
        self._did("start")

    def poll(self) -> bool:
        self._check()
        return self.connected

    def send(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        self._did("send")

    def recv(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        self._did("recv")

    def done(self) -> bool:
        self._check()
        return self.finished

    def abort(self) -> None:
        self.calls.append("abort")

    def _did(self, name: str) -> None:
        self.calls.append(name)
        self._check()

    def _check(self) -> None:
        if self.error:
            raise LinkError(self.error)
