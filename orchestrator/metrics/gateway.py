"""What a gateway worker counts, and what all workers together have counted.

Whoever is asked saves its own tally before it tells a sum: no worker can tell less afterwards, not
even after one was killed, because its successor goes on from what was saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import structlog

from orchestrator.core.decision import Mode
from orchestrator.core.ticket import Grant, Outcome, ShardView
from orchestrator.metrics.folder import SnapshotFolder
from orchestrator.metrics.tally import Tally
from orchestrator.metrics.text import Scrape

log = structlog.get_logger(__name__)

FOLD_REQUESTS = 256
"""So many requests' times wait to be sorted into buckets: 0.3 ms of work, a few kB."""
SAVE_PERIOD_S = 1.0
"""What a worker that is killed may lose of its counters."""
_SHOWN = {
    "requests": "orchestrator_requests",
    "tokens": "orchestrator_tokens",
    "kv_imports": "orchestrator_kv_imports",
    "kv_pulls": "orchestrator_kv_pulls",
    "kv_pulled_bytes": "orchestrator_kv_pulled_bytes",
    "routing": "orchestrator_routing",
    "capped": "orchestrator_capped",
    "shed": "orchestrator_shed",
    "key_requests": "orchestrator_key_requests",
    "key_tokens": "orchestrator_key_tokens",
}


class Metrics:
    """Counters and histograms; `shards` and `mode` are asked at each scrape.

    Workers with the same `folder` tell their sum; without one, everything stays in memory.
    """

    def __init__(
        self,
        shards: Callable[[], tuple[ShardView, ...]],
        mode: Callable[[], Mode] = Mode,
        folder: Path | None = None,
        worker: int = 0,
    ) -> None:
        self._shards = shards
        self._mode = mode
        self._own = own = Tally()
        self.open_here: Callable[[], int] = int
        """Set by the application: how many requests this worker has open."""
        self.redis_up: Callable[[], bool] = lambda: True
        """Likewise: whether Redis answers this worker."""
        self._saves = 0
        self._folder = SnapshotFolder(folder, worker) if folder else None
        if self._folder and (left := self._folder.inherited()):
            _add(own, left, lives=False)
        counters, histograms = own.counters, own.histograms
        self._requests = counters["orchestrator_requests"]
        self._tokens = counters["orchestrator_tokens"]
        self._key_requests = counters["orchestrator_key_requests"]
        self._key_tokens = counters["orchestrator_key_tokens"]
        self._imports = counters["orchestrator_kv_imports"]
        self._pulls = counters["orchestrator_kv_pulls"]
        self._pulled_bytes = counters["orchestrator_kv_pulled_bytes"]
        self._routing = counters["orchestrator_routing"]
        self._capped = counters["orchestrator_capped"]
        self._shed = counters["orchestrator_shed"]
        self._tgi_count = counters["tgi_request_count"]
        self._tgi_success = counters["tgi_request_success"]
        self._tgi_failure = counters["tgi_request_failure"]
        self._pull_s = histograms["orchestrator_kv_pull_seconds"][()].observe
        self._phase_s = histograms["orchestrator_phase_seconds"]
        self._ttft_s = histograms["orchestrator_ttft_seconds"][()].observe
        self._tpot_s = histograms["orchestrator_tpot_seconds"][()].observe
        self._tgi_duration_s = histograms["tgi_request_duration"][()].observe
        self._tgi_queue_s = histograms["tgi_request_queue_duration"][()].observe
        self._tgi_inference_s = histograms["tgi_request_inference_duration"][()].observe
        self._tgi_validation_s = histograms["tgi_request_validation_duration"][()].observe
        self._tgi_token_s = histograms["tgi_request_mean_time_per_token_duration"][()].observe
        self._tgi_input = histograms["tgi_request_input_length"][()].observe
        self._tgi_new = histograms["tgi_request_max_new_tokens"][()].observe
        self._tgi_generated = histograms["tgi_request_generated_tokens"][()].observe
        self._waiting = _Waiting(own)
        self._unfolded = 0

    # --- on the way of a request ------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Requests that wait for a grant in this worker now."""
        return self._own.queued

    def waiting(self) -> _Waiting:
        """Counts a request as queued for the length of a `with` block."""
        return self._waiting

    def arrived(self) -> None:
        self._tgi_count[()] += 1

    def unparsed(self, route: str, error_type: str, key_name: str = "") -> None:
        """A request that was refused before it became one: by its body, its key, or its key's limits."""
        self.arrived()
        self._requests[route, Outcome.REFUSED] += 1
        self._tgi_failure[error_type,] += 1
        if key_name:
            self._count_key(key_name, Outcome.REFUSED, 0, 0)

    def granted(self, grant: Grant) -> None:
        self._routing[grant.choice, grant.reason] += 1

    def capped(self) -> None:
        """The mode allows a request fewer tokens than it wanted and could have had."""
        self._capped[()] += 1

    def shed(self) -> None:
        """The mode refuses a request for its priority; `ended` counts it as well."""
        self._shed[()] += 1

    def imported(self, result: str) -> None:
        """`hit` or the reason of a miss, as the decode shard reported it."""
        self._imports[result,] += 1

    def pulled(self, result: str, took_s: float, kv_bytes: int) -> None:
        """`ok`, a miss reason, or `lost` and `timeout` for a sidecar that did not answer."""
        self._pulls[result,] += 1
        self._pull_s(took_s)
        self._pulled_bytes[()] += kv_bytes

    def ended(
        self,
        route: str,
        outcome: Outcome,
        *,
        error_type: str | None,
        phases_s: Mapping[str, float],
        total_s: float,
        ttft_s: float | None,
        prompt_tokens: int,
        generated_tokens: int,
        key_name: str = "",
        max_new_tokens: int = 0,
        validation_s: float | None = None,
    ) -> None:
        """A request is over; times in seconds.  `key_name` is that of its API key, if it had a named one."""
        self._unfolded += 1
        if self._unfolded >= FOLD_REQUESTS:
            self._unfolded = 0
            self._own.fold()
        self._requests[route, outcome] += 1
        by_phase = self._phase_s
        for phase, took_s in phases_s.items():
            by_phase[phase,].observe(took_s)
        if ttft_s is not None:
            self._ttft_s(ttft_s)
        if key_name:
            self._count_key(key_name, outcome, prompt_tokens, generated_tokens)
        if outcome is not Outcome.DONE:
            if error_type is not None:
                self._tgi_failure[error_type,] += 1
            return
        self._tokens["prompt",] += prompt_tokens
        self._tokens["generated",] += generated_tokens
        self._tgi_success[()] += 1
        queue_s = phases_s.get("queue", 0.0)
        self._tgi_duration_s(total_s)
        self._tgi_queue_s(queue_s)
        self._tgi_inference_s(max(0.0, total_s - queue_s))
        self._tgi_generated(generated_tokens)
        self._tgi_input(prompt_tokens)
        if max_new_tokens:
            self._tgi_new(max_new_tokens)
        if validation_s is not None:
            self._tgi_validation_s(validation_s)
        if ttft_s is not None and generated_tokens > 1:
            per_token_s = (total_s - ttft_s) / (generated_tokens - 1)
            self._tpot_s(per_token_s)
            self._tgi_token_s(per_token_s)

    def _count_key(self, key: str, outcome: Outcome, prompt_tokens: int, generated_tokens: int) -> None:
        """Tokens also of requests that failed or were left: shards have worked for them."""
        self._key_requests[key, outcome] += 1
        if outcome is not Outcome.REFUSED:
            self._key_tokens[key, "prompt"] += prompt_tokens
            self._key_tokens[key, "generated"] += generated_tokens

    # --- what is told -----------------------------------------------------------------------------

    def counters(self) -> dict[str, dict[str, float]]:
        """Our counters over all workers by name, then by label values joined with a comma."""
        tally, _ = self._together()
        return {
            shown: {",".join(labels): value for labels, value in tally.counters[name].items()}
            for shown, name in _SHOWN.items()
        }

    def open_requests(self) -> int:
        """Requests that all living workers have open."""
        return self._together()[0].open

    def render(self) -> bytes:
        """Prometheus' text format, over all workers."""
        tally, workers = self._together()
        return Scrape(tally, workers, self._shards(), self._mode().level, self.redis_up()).text()

    def _together(self) -> tuple[Tally, int]:
        """The sum over all workers that ever ran, and how many live."""
        self.save()
        if self._folder is None:
            self._own.open = self.open_here()
            self._own.fold()
            return self._own, 1
        total, lives = Tally(), 1
        total.add(self._own.to_json(), lives=True)
        for sibling in self._folder.siblings():
            _add(total, sibling.tally, lives=sibling.lives)
            lives += sibling.lives
        return total, lives

    # --- what is kept -----------------------------------------------------------------------------

    def save(self) -> None:
        """Put our own tally where the other workers and our successor find it."""
        if self._folder is not None:
            self._folder.write(*self._next_save())

    async def keep_saving(self) -> None:
        """Saves once per period, off the event loop: a slow disk holds up no stream.  Until cancelled."""
        while self._folder is not None:
            await asyncio.sleep(SAVE_PERIOD_S)
            await asyncio.to_thread(self._folder.write, *self._next_save())

    def close(self) -> None:
        """Save for the last time."""
        self.save()
        if self._folder is not None:
            self._folder.close()

    def _next_save(self) -> tuple[int, bytes]:
        self._saves += 1
        self._own.open = self.open_here()
        return self._saves, self._own.to_json()


class _Waiting:
    """Used by every request anew; a generator would cost a microsecond."""

    __slots__ = ("_tally",)

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __enter__(self) -> None:
        self._tally.queued += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._tally.queued -= 1


def _add(tally: Tally, snapshot: bytes, *, lives: bool) -> None:
    """One that cannot be read is left out, and said so."""
    try:
        tally.add(snapshot, lives=lives)
    except ValueError as error:
        log.warning("metrics_unreadable", error=str(error))
