"""What both kinds of hooks do in a step in which prompts with a handle complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tgi_patches.contract import GetTag, MissReason, PutTag
from tgi_patches.hooks import first_token
from tgi_patches.hooks.overlay import Overlay
from tgi_patches.hooks.rows import Row


class Step(Protocol):
    """One first step of requests with handles."""

    def indexed(self) -> Sequence[tuple[int, Row]]:
        """Each of them by its place in the batch."""

    def put_of(self, criteria: Any) -> Row | None:
        """The put leg whose stop rule this is."""


S = TypeVar("S", bound=Step)


class StepHooks(Generic[S]):
    """`step` is set while TGI's own code runs such a step."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay
        self._step: S | None = None
        self._limit_reached = 0
        """TGI's finish reason `length`."""

    def stop(self, original: Callable[..., Any], criteria: Any, *last: Any) -> Any:
        """Around StoppingCriteria.__call__."""
        step = self._step
        row = self._overlay.shielded(lambda: step.put_of(criteria), None) if step is not None else None
        if row is None:
            return original(criteria, *last)
        return first_token.stop(row, self._limit_reached, original, criteria, *last)

    def top_tokens(self, original: Callable[..., Any], top_n: Any, *rest: Any) -> Any:
        """Around batch_top_tokens."""
        lists = original(top_n, *rest)
        if self._step is None:
            return lists
        settle = partial(first_token.settle_top, self._step.indexed(), top_n, *lists)
        return self._overlay.shielded(settle, lists)

    def _step_failed(self, rows: Mapping[int, Row]) -> None:
        """TGI fails every request of the batch: nobody needs to wait for its put legs' records."""
        for row in rows.values():
            if isinstance(row.tag, PutTag):
                self._overlay.relay.not_put(row.tag, MissReason.ERROR, "the step failed")
        self._overlay.flush()

    def _refused(self, tag: GetTag, prompt_tokens: int) -> str:
        """The result of a get leg that asks for the log probabilities of its prompt."""
        detail = "prompt logprobs need the whole prompt"
        return self._overlay.relay.not_got(tag, MissReason.UNSUPPORTED, detail, prompt_tokens)
