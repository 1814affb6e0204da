"""How far a conductor is on its way from what runs to what is wanted, in one fact.

idle --wanted--> rolling --all is as wanted--> done
                    └────a new shard does not get ready, or there is no room────> failed
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RollState(StrEnum):
    IDLE = "idle"
    ROLLING = "rolling"
    DONE = "done"
    FAILED = "failed"
    """It stopped; what ran before and was not replaced yet goes on."""


@dataclass(frozen=True, slots=True)
class Roll:
    """`id` is that of the wish it follows; empty for the settings that the conductor was started with."""

    id: str = ""
    state: RollState = RollState.IDLE
    doing: str = ""
    """The present step, for a user."""
    done: tuple[str, ...] = ()
    """The steps before, each in a sentence."""
    problem: str = ""
    """Why it failed, in a sentence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", RollState(self.state))
        object.__setattr__(self, "done", tuple(self.done))

    @property
    def over(self) -> bool:
        return self.state in (RollState.DONE, RollState.FAILED)
