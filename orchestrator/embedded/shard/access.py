"""One log line per generation, under the name that the gateway gave its request; never what was said."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from orchestrator.errors import GatewayError
from tgi_patches.contract import GetTag, PutTag, parse_tag

from .seam import Generation, Request

log = structlog.get_logger(__name__)

LEFT = "left"
"""Outcome of a generation that nobody waited for; the others are finish reasons and error types."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Which request a generation belongs to, and on which route it came."""

    request_id: str = ""
    route: str = ""

    @classmethod
    def of(cls, route: str, request_id: str) -> Origin:
        """`request_id` is the header's; one that is not safe in a log is left out."""
        return cls(request_id if _REQUEST_ID.fullmatch(request_id) else "", route)


async def logged(
    steps: AsyncGenerator[Generation], origin: Origin, request: Request
) -> AsyncGenerator[Generation]:
    """The same steps.  The line is written when they end, however they do."""
    began_s = time.monotonic()
    tokens, imported, outcome = 0, "", LEFT
    try:
        async with aclosing(steps):
            async for step in steps:
                tokens += 1
                imported = imported or step.import_result
                if step.generated_text is not None:
                    outcome = step.generated_text.finish_reason
                yield step
    except GatewayError as error:
        outcome = error.error_type
        raise
    finally:
        log.info(
            "generation",
            request_id=origin.request_id,
            route=origin.route,
            leg=leg_of(request.adapter_id),
            prompt_tokens=len(request.input_ids),
            generated_tokens=tokens,
            import_result=imported,
            outcome=outcome,
            took_s=round(time.monotonic() - began_s, 4),
        )


def leg_of(adapter_id: str) -> str:
    match parse_tag(adapter_id):
        case PutTag():
            return "put"
        case GetTag():
            return "get"
    return "plain"
