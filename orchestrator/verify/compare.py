"""Compare two answers to one request and judge how the separated one was served.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from orchestrator.verify.answer import IMPORT_HIT, ROUTE_SEPARATED, Answer, Token

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3, "int8": 1e-3}
"""Largest allowed difference between two logprobs, by dtype."""

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers part."""

    what: str
    index: int | None
    """Index of the generated token, from 0; None for what concerns the whole answer."""
    separated: Value
    reference: Value

    def __str__(self) -> str:
        where = "" if self.index is None else f" of token {self.index}"
        return f"{self.what}{where}: separated {self.separated!r}, reference {self.reference!r}"


def first_difference(separated: Answer, reference: Answer, tolerance: float) -> Difference | None:
    """The first divergence in reading order, or None when the answers are the same.

    Ids, token texts, counts, text and reasons must be equal; logprobs within `tolerance`.
    """
    return next(_differences(separated, reference, tolerance), None)


def largest_logprob_gap(separated: Answer, reference: Answer) -> float:
    """max |delta logprob| over the tokens both have; 0.0 where none has a logprob."""
    gaps = (
        abs(a.logprob - b.logprob)
        for a, b in zip(separated.tokens, reference.tokens, strict=False)
        if a.logprob is not None and b.logprob is not None
    )
    return max(gaps, default=0.0)


def path_problem(separated: Answer) -> str | None:
    """Why this answer does not show an imported record; None when it does or needs none.

    A request that ended at its first token never reaches decode, so it needs no import.
    """
    if not separated.complete or separated.generated_tokens < 2:
        return None
    route = separated.route
    if route.choice != ROUTE_SEPARATED:
        served = f"served {route.choice}" if route.choice else "the gateway did not say how it served it"
        return f"{served} ({route.reason})" if route.reason else served
    if route.imported != IMPORT_HIT:
        return f"a silent local prefill: import={route.imported or 'not told'}"
    return None


def _differences(left: Answer, right: Answer, tolerance: float) -> Iterator[Difference]:
    if left.status != right.status:
        yield Difference("status", None, left.status, right.status)
    if left.error != right.error:
        yield Difference("error", None, left.error, right.error)
    for index, pair in enumerate(zip_longest(left.tokens, right.tokens)):
        yield from _token_differences("", index, *pair, tolerance=tolerance)
    whole = (
        ("text", left.text, right.text),
        ("function calls", _said(left.calls), _said(right.calls)),
        ("finish reason", left.finish_reason, right.finish_reason),
        ("count of generated tokens", left.generated_tokens, right.generated_tokens),
        ("count of prompt tokens", left.prompt_tokens, right.prompt_tokens),
        ("seed", left.seed, right.seed),
    )
    for what, one, other in whole:
        if one != other:
            yield Difference(what, None, one, other)


def _token_differences(
    kind: str, index: int, left: Token | None, right: Token | None, *, tolerance: float
) -> Iterator[Difference]:
    if left is None or right is None:
        one, other = left.text if left else None, right.text if right else None
        yield Difference(f"{kind}presence", index, one, other)
        return
    if left.id != right.id:
        yield Difference(f"{kind}id", index, left.id, right.id)
    if not _close(left.logprob, right.logprob, tolerance):
        yield Difference(f"{kind}logprob", index, left.logprob, right.logprob)
    if left.text != right.text:
        yield Difference(f"{kind}text", index, left.text, right.text)
    for likely in zip_longest(left.top, right.top):
        yield from _token_differences("top-list ", index, *likely, tolerance=tolerance)


def _said(calls: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{name}({arguments})" for name, arguments in calls)


def _close(left: float | None, right: float | None, tolerance: float) -> bool:
    if left is None or right is None:
        return left is right
    return abs(left - right) <= tolerance
