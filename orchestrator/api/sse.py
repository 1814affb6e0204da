"""The event stream's two dialects, under the name that the HTTP layers use; see `core.sse`."""

from orchestrator.core.sse import (
    DONE,
    EVENT_LIMIT_BYTES,
    KEEP_ALIVE,
    BrokenStream,
    Event,
    Parser,
    comment,
    openai_event,
    tgi_event,
)

__all__ = [
    "DONE",
    "EVENT_LIMIT_BYTES",
    "KEEP_ALIVE",
    "BrokenStream",
    "Event",
    "Parser",
    "comment",
    "openai_event",
    "tgi_event",
]
