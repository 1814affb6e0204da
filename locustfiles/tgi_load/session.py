"""What the users of one Locust process share."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from random import Random

from locust.env import Environment

from .answers import Fault
from .checks import LoadError, checked
from .client import Target
from .report import Slo
from .server import Server
from .tally import Tally
from .timing import Outcome

TTFT, TPOT, REFUSED, POST = "TTFT", "TPOT", "REFUSED", "POST"


class RequestFailed(Exception):
    """What Locust counts as a failure; its text says which kind."""


class Session:
    """One test after the other against one server."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.tally = Tally()
        self.target: Target | None = None
        self.server: Server | None = None
        self.trouble: str | None = None
        """Why no load can be made."""
        self.broke: str | None = None
        """Where the shape `ramp` stopped."""
        self._users: Counter[str] = Counter()

    @property
    def options(self) -> Namespace:
        options: Namespace | None = self.environment.parsed_options
        assert options is not None
        return options

    @property
    def slo(self) -> Slo:
        return Slo(self.options.slo_ttft_ms, self.options.slo_tpot_ms)

    def begin(self) -> None:
        """A test starts: learn about its server.  What is wrong becomes `trouble`."""
        self.tally.clear()
        self._users.clear()
        self.trouble = self.broke = None
        try:
            checked(self.options)
            if not self.environment.host:
                raise LoadError("Name a server with --host, such as --host http://127.0.0.1:8080.")
            self.target = Target.of(self.environment.host, self.options)
            self.server = Server.asked(self.target)
        except LoadError as error:
            self.trouble = str(error)

    def random(self, name: str) -> Random:
        """The same for the same user of the same test: seed, worker, kind of user and its number."""
        self._users[name] += 1
        worker = getattr(self.environment.runner, "worker_index", 0)
        return Random(f"{self.options.seed}/{worker}/{name}/{self._users[name]}")

    def record(self, outcome: Outcome, fault: Fault | None) -> None:
        """Into the tally and into Locust's tables."""
        self.tally.outcomes.append(outcome)
        name = (
            f"{outcome.name} [{outcome.route}]" if self.options.by_route and outcome.route else outcome.name
        )
        if fault is None:
            self._fire(POST, name, outcome.total_ms, outcome.tokens)
            if outcome.ttft_ms is not None:
                self._fire(TTFT, name, outcome.ttft_ms)
            if outcome.tpot_ms is not None:
                self._fire(TPOT, name, outcome.tpot_ms)
        elif fault.refused:
            error = None if self.options.tolerate_refusals else RequestFailed(str(fault))
            self._fire(REFUSED, name, outcome.total_ms, exception=error)
        else:
            self._fire(POST, name, outcome.total_ms, exception=RequestFailed(str(fault)))

    def _fire(
        self, request_type: str, name: str, milliseconds: float, tokens: int = 0,
        exception: Exception | None = None,
    ) -> None:  # fmt: skip
        self.environment.events.request.fire(
            request_type=request_type,
            name=name,
            response_time=milliseconds,
            response_length=tokens,
            exception=exception,
            context={},
        )
