"""Load shapes; they read --users, --spawn-rate and --run-time at each tick, as Locust's page changes them."""

from __future__ import annotations

import logging
from typing import Any

from locust import LoadTestShape

from . import curves
from .ramp import Step, broken, over, sentence, step_of
from .session import Session

log = logging.getLogger(__name__)
Tick = tuple[int, float] | None


class SessionShape(LoadTestShape):
    """A shape that knows its session."""

    abstract = True
    use_common_options = True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def reset_time(self) -> None:
        super().reset_time()
        # Of an earlier test on Locust's page.
        self.session.trouble = None

    @property
    def options(self) -> Any:
        return self.session.options

    @property
    def most_users(self) -> int:
        return self.options.num_users or 1

    def over(self) -> bool:
        """True after --run-time, and when no load can be made."""
        limit_s = self.options.run_time
        return bool(self.session.trouble or (limit_s and self.get_run_time() >= limit_s))


class Burst(SessionShape):
    """Few users, and all of them at once for a moment of each period."""

    abstract = True

    def tick(self) -> Tick:
        base_users = min(self.options.burst_base_users, self.most_users)
        curve = curves.Burst(
            base_users, self.most_users, self.options.burst_period_s, self.options.burst_length_s
        )
        # All within a second: that is what a burst is.
        return None if self.over() else (curve.at(self.get_run_time()), max(1, self.most_users))


class Day(SessionShape):
    """An office day, compressed."""

    abstract = True

    def tick(self) -> Tick:
        curve = curves.Day(self.most_users, self.options.day_length_s)
        return None if self.over() else (curve.at(self.get_run_time()), max(1, self.most_users))


class Ramp(SessionShape):
    """Steps up until one does not hold, or --users and --run-time are reached."""

    abstract = True

    def reset_time(self) -> None:
        super().reset_time()
        self._users = 0
        self._since_s = 0.0
        self._seen = 0
        self._held: Step | None = None

    def tick(self) -> Tick:
        if self._users:
            ended = self.session.tally.outcomes[self._seen :]
            step = step_of(self._users, self.get_run_time() - self._since_s, ended)
            if over(step, self.options.ramp_step_s) and not self._judged(step):
                return None
        else:
            self._climb()
        return None if self.over() else (self._users, max(1, self.options.ramp_step_users))

    def _judged(self, step: Step) -> bool:
        """True when the ramp goes on."""
        why = broken(step, self.options.slo_ttft_ms, self.options.tolerate_refusals)
        if why:
            self.session.broke = sentence(step, why, self._held)
            return False
        log.info("Held: %s", step)
        self._held = step
        if step.users >= self.most_users:
            self.session.broke = f"Not broken by --users: the last step that held: {step}."
            return False
        self._climb()
        return True

    def _climb(self) -> None:
        self._users = min(self.most_users, self._users + self.options.ramp_step_users)
        self._since_s = self.get_run_time()
        self._seen = len(self.session.tally.outcomes)


SHAPES: dict[str, type[SessionShape]] = {"burst": Burst, "day": Day, "ramp": Ramp}
