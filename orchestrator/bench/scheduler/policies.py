"""What decides in a simulation: the policy of production, and the baseline that it is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from orchestrator.core.decision import Mode, Refuse
from orchestrator.core.pending import Place
from orchestrator.core.routing import first_come
from orchestrator.core.ticket import Completion, Grant, Relayed, ShardView, Ticket


class SchedulingPolicy(Protocol):
    """What decides, fed with what a conductor hears; `core.scheduling.Scheduler` is the one in question."""

    def add(self, tickets: Mapping[Place, Ticket], now_s: float) -> None: ...
    def forget(self, handles: Iterable[str]) -> None: ...
    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None: ...
    def relayed(self, relayed: Relayed, now_s: float) -> None: ...
    def ended(self, completion: Completion, now_s: float) -> None: ...
    def decide(
        self, shards: Sequence[ShardView], mode: Mode, now_s: float
    ) -> Iterable[tuple[Ticket, Grant | Refuse]]: ...


class FirstCome:
    """The baseline: each ticket goes to the least loaded shards as it comes, and their routers batch."""

    def __init__(self) -> None:
        self._waiting: dict[str, Ticket] = {}

    def add(self, tickets: Mapping[Place, Ticket], now_s: float) -> None:  # noqa: ARG002 - the Protocol's
        self._waiting.update((ticket.handle, ticket) for ticket in tickets.values())

    def forget(self, handles: Iterable[str]) -> None:
        for handle in handles:
            self._waiting.pop(handle, None)

    def granted(self, ticket: Ticket, grant: Grant, now_s: float) -> None:  # noqa: ARG002 - the Protocol's
        self.forget((ticket.handle,))

    def relayed(self, relayed: Relayed, now_s: float) -> None:
        """It keeps no account of what runs."""

    def ended(self, completion: Completion, now_s: float) -> None:
        """It keeps no account of what runs."""

    def decide(
        self,
        shards: Sequence[ShardView],
        mode: Mode,
        now_s: float,  # noqa: ARG002 - the Protocol's
    ) -> Iterator[tuple[Ticket, Grant | Refuse]]:
        return first_come(list(self._waiting.values()), shards, mode=mode)
