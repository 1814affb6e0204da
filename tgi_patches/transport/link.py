"""Drives one link's communicator as `state` decides.  Every call returns at once; time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tgi_patches.transport.state import Event, LinkLimits, LinkState, Phase, step


class LinkError(Exception):
    """A communicator is of no more use: aborted, and replaced by another one after a rest."""


class Communicator(Protocol):
    """Two ends of a way for bytes; no method waits.  Made for one connection and thrown away after it."""

    def start(self) -> None:
        """Begin to connect.  Raises LinkError."""

    def poll(self) -> bool:
        """Connected, and nothing is wrong.  Raises LinkError."""

    def send(self, tensor: Tensor) -> None:
        """Begin to send all of `tensor`, contiguous uint8, left alone until `done`.  Raises LinkError."""

    def recv(self, tensor: Tensor) -> None:
        """The same the other way."""

    def done(self) -> bool:
        """What was begun has ended.  Raises LinkError."""

    def abort(self) -> None:
        """Let go of the peer whatever is under way.  Its memory may be written to a little longer."""


class Link:
    """One end.  `moved` is called when a tensor arrived or was sent, `lost` when the link was aborted."""

    def __init__(self, limits: LinkLimits, *, moved: Callable[[], None], lost: Callable[[str], None]) -> None:
        self._limits = limits
        self._moved = moved
        self._lost = lost
        self._communicator: Communicator | None = None
        self.state = LinkState()

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def busy(self) -> bool:
        """Something is awaited: poll it soon."""
        return self.phase not in (Phase.IDLE, Phase.READY)

    def connect(self, communicator: Communicator, now_s: float) -> bool:
        """Begin; False where this link rests or is in use."""
        if self.phase is not Phase.IDLE:
            return False
        self._communicator = communicator
        self._step(Event.CONNECT, now_s)
        self._do(communicator.start, now_s)
        return True

    def offer(self, now_s: float) -> bool:
        """A record is offered, by either end; False where it cannot be."""
        self._step(Event.OFFER, now_s)
        return self.phase is Phase.OFFERED

    def refused(self, now_s: float) -> None:
        self._step(Event.REFUSED, now_s)

    def send(self, tensor: Tensor, now_s: float) -> None:
        """The offer was accepted."""
        self._move(lambda communicator: communicator.send(tensor), now_s)

    def recv(self, tensor: Tensor, now_s: float) -> None:
        """The offer is accepted."""
        self._move(lambda communicator: communicator.recv(tensor), now_s)

    def fail(self, reason: str, now_s: float) -> None:
        """Abort: the other end said so, or what came was not what was offered."""
        self._step(Event.FAILED, now_s, reason)

    def poll(self, now_s: float) -> None:
        """Look at what is under way.  An error of a quiet link is found here too."""
        self._do(lambda: self._look(now_s), now_s)
        self._step(Event.TICK, now_s)

    def _move(self, begin: Callable[[Communicator], None], now_s: float) -> None:
        self._step(Event.ACCEPTED, now_s)
        communicator = self._communicator
        if self.phase is Phase.MOVING and communicator is not None:
            self._do(lambda: begin(communicator), now_s)

    def _look(self, now_s: float) -> None:
        communicator = self._communicator
        if communicator is None:
            return
        if self.phase is Phase.MOVING:
            if communicator.done():
                self._step(Event.MOVED, now_s)
                self._moved()
        elif communicator.poll():
            self._step(Event.CONNECTED, now_s)

    def _do(self, work: Callable[[], None], now_s: float) -> None:
        try:
            work()
        except LinkError as error:
            self._step(Event.FAILED, now_s, str(error))

    def _step(self, event: Event, now_s: float, reason: str = "") -> None:
        before, self.state = self.state, step(self.state, event, now_s, self._limits, reason)
        if self.phase is Phase.ABORTED and before.phase is not Phase.ABORTED:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.abort()
            self._lost(self.state.reason)
