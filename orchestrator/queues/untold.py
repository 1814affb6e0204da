"""What a gateway did that Redis has not heard of: grants of its own, imported records, and what Redis forgot.

A heartbeat tells it.  Every call may come twice: Redis knows by the handle and by what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestrator.core.ticket import Relayed
from orchestrator.queues import calls
from orchestrator.queues.calls import Call
from orchestrator.queues.keys import Keys
from orchestrator.queues.open import OpenRequest


class Untold:
    """By handle."""

    def __init__(self, keys: Keys, gateway: str, queue_size: int) -> None:
        self._keys = keys
        self._gateway = gateway
        self._queue_size = queue_size
        self._handles: dict[str, Relayed | None] = {}

    def add(self, handle: str, relayed: Relayed | None = None) -> None:
        """Redis does not know what is held for this request now, or that its record was imported."""
        self._handles[handle] = relayed or self._handles.get(handle)

    def forget(self, handle: str) -> None:
        """The request is over."""
        self._handles.pop(handle, None)

    def telling(
        self, missing: Iterable[str], request_of: Callable[[str], OpenRequest | None]
    ) -> tuple[list[Call], dict[str, Relayed | None]]:
        """The calls, for `missing` handles too, and what `told` is to be told after them."""
        found = list(map(request_of, dict.fromkeys((*self._handles, *missing))))
        told = dict(self._handles)
        return [call for request in found if request is not None for call in self._calls(request)], told

    def told(self, told: dict[str, Relayed | None]) -> None:
        """Redis has heard it; what was added since is kept."""
        for handle, relayed in told.items():
            if handle in self._handles and self._handles[handle] is relayed:
                del self._handles[handle]

    def submission(self, request: OpenRequest) -> Call:
        return calls.submit(self._keys, request.ticket, self._queue_size)

    def _calls(self, request: OpenRequest) -> Sequence[Call]:
        if request.held is None:
            return [self.submission(request)] if request.announced else []
        relayed = self._handles.get(request.ticket.handle)
        restored = calls.restore(self._keys, self._gateway, request.held)
        if relayed is None:
            return [restored]
        return [calls.relayed(self._keys, self._gateway, request.held, relayed), restored]
