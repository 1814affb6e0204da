"""The same test on asyncio's own event loop and on uvloop's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """What a callback raises fails the test too: otherwise the loop would only log it."""

    @pytest.mark.parametrize("loop", LOOPS)
    def run(loop: str, **fixtures: Any) -> None:
        unheard: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: unheard.append(context))
            runner.run(test(**fixtures))
        assert not unheard, unheard

    asked = inspect.signature(test).parameters.values()
    first = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *asked])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
