"""How a request ends: the last word to its client, one line in the log, one word to the queue."""

from __future__ import annotations

import asyncio

import structlog

from orchestrator.core import redress
from orchestrator.core.redress import Dialect
from orchestrator.core.request import Event
from orchestrator.core.sse import DONE
from orchestrator.core.ticket import Completion, Outcome
from orchestrator.errors import GatewayError
from orchestrator.metrics import Metrics
from orchestrator.queues.protocol import RequestQueue
from orchestrator.run import Run, encoded

log = structlog.get_logger()

_LAST_WORD_S = 1.0
_ENDINGS = {
    Outcome.REFUSED: Event.REFUSED,
    Outcome.CANCELLED: Event.CANCELLED,
    Outcome.FAILED: Event.FAILED,
}


def settle(
    run: Run, outcome: Outcome, error: GatewayError | None, queue: RequestQueue, metrics: Metrics
) -> None:
    """The request is over: count it, log it, tell the queue.  Runs once per request, without a pause."""
    run.enter("")
    if outcome in _ENDINGS and not run.state.terminal:
        run.step(_ENDINGS[outcome])
    total_s = run.clock() - run.arrived_s
    metrics.ended(
        run.job.route,
        outcome,
        error_type=error.error_type if error else None,
        phases_s=run.phases_s,
        total_s=total_s,
        ttft_s=run.ttft_s,
        prompt_tokens=run.prompt_tokens,
        generated_tokens=run.generated_tokens,
        key_name=run.job.key_name,
        max_new_tokens=run.max_new_tokens,
    )
    _log_access(run, outcome, error, total_s)
    run.job.charge(run.prompt_tokens + run.generated_tokens if run.granted is not None else 0)
    if run.granted is not None:
        queue.complete(_completion(run, outcome))
    elif run.handle:
        queue.cancel(run.handle)


async def end_with_error(run: Run, error: GatewayError) -> None:
    """The last event of a stream that cannot go on; a client that does not read is given up."""
    if not run.job.stream:
        return
    payload = redress.error_event(run.job.dialect, str(error), error.status, error.error_type)
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            # As in TGI, what ends the OpenAI routes' streams stands behind an error too.
            last = b"" if run.job.dialect is Dialect.TGI else DONE
            await run.out.send(encoded(run.job, payload) + last)
            await run.out.finish()
    except TimeoutError:
        log.warning("client_does_not_read", request_id=run.job.request_id)


def _completion(run: Run, outcome: Outcome) -> Completion:
    return Completion(
        handle=run.handle,
        outcome=outcome,
        phases_s=dict(run.phases_s),
        prompt_tokens=run.prompt_tokens,
        generated_tokens=run.generated_tokens,
        imported=run.imported,
        first_token_s=run.first_token_s,
    )


def _log_access(run: Run, outcome: Outcome, error: GatewayError | None, total_s: float) -> None:
    """One line per request; never a prompt, never an answer."""
    log.info(
        "request",
        route=run.job.route,
        request_id=run.job.request_id,
        key=run.job.key_name or None,
        outcome=str(outcome),
        status=200 if error is None or run.out.started else error.status,
        choice=None if run.granted is None else str(run.granted.choice),
        prompt_tokens=run.prompt_tokens,
        generated_tokens=run.generated_tokens,
        imported=run.import_result,
        ttft_s=None if run.ttft_s is None else round(run.ttft_s, 4),
        took_s=round(total_s, 4),
        error=None if error is None else error.error_type,
    )
