"""The first token of a request: noted in a put leg's step, forced in a get leg's whose handle names one.

Tensors as TGI's choosers return them: ids [batch], logprobs [batch], all logprobs [batch, vocab].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import GetTag, PutTag
from tgi_patches.hooks.rows import Row

PerRow = list[list[list[Any]]]
"""What TGI's batch_top_tokens returns: by row of the batch, by accepted token, ids or logprobs."""
Stop = Callable[..., tuple[bool, int | None]]
"""TGI's StoppingCriteria.__call__: last token, its text -> has it ended, why."""


def settle(row: Row, index: int, ids: Tensor, logprobs: Tensor, all_logprobs: Tensor) -> None:
    """Note what row `index` sampled, or let it have sampled what its handle says."""
    if isinstance(row.tag, PutTag):
        row.sampled = (int(ids[index]), float(logprobs[index]))
    elif (first := forced(row, all_logprobs[index])) is not None:
        ids[index], logprobs[index] = first


def rewind(chooser: Any, index: int) -> None:
    """Let a sampled row draw its first token with its first number.

    TGI draws for a row in every chunk of its prompt, so that the answer would depend on the chunks,
    which the two legs of a request do not share.
    """
    sampling = getattr(getattr(chooser, "choice", None), "sampling_mapping", {}).get(index)
    if sampling is not None:
        sampling.generator.manual_seed(sampling.seed)


def forced(row: Row, logprobs: Tensor) -> tuple[int, float] | None:
    """Id and logprob with which a get leg begins; `logprobs` [vocab] are this server's own.

    None where the handle names no token: the leg then begins with what it sampled itself.
    """
    token_id = _named(row)
    if token_id is None:
        return None
    exported = _exported(row)
    return token_id, float(logprobs[token_id]) if exported is None else exported.logprob


def _named(row: Row) -> int | None:
    """The token that a get leg's handle names."""
    return row.tag.first_token_id if isinstance(row.tag, GetTag) else None


def _exported(row: Row) -> FirstToken | None:
    """The imported record's first token, where the get leg is to begin with that one."""
    first = None if row.imported is None else row.imported.first
    return first if first is not None and first.id == _named(row) else None


def settle_top(
    rows: Iterable[tuple[int, Row]], top_n: Sequence[int], ids: PerRow, logprobs: PerRow
) -> tuple[PerRow, PerRow]:
    """Note the lists of put legs; those of get legs that begin with an exported token become its.

    As TGI made them: it adds tokens that tie with the n-th, in an order of its own.
    """
    ids, logprobs = list(ids), list(logprobs)
    for index, row in rows:
        if not top_n[index]:
            continue
        if isinstance(row.tag, PutTag):
            row.top = tuple(zip(ids[index][0], logprobs[index][0], strict=True))
        elif (first := _exported(row)) is not None and first.top:
            ids[index] = [[token_id for token_id, _ in first.top]]
            logprobs[index] = [[logprob for _, logprob in first.top]]
    return ids, logprobs


def stop(row: Row, limit_reached: int, original: Stop, criteria: Any, *last: Any) -> tuple[bool, int | None]:
    """A put leg's stop test: end token and stop strings before the length, which TGI tests first.

    A put leg has one token to make, so it would always end with `length`.  `limit_reached` is what
    TGI answers then.
    """
    limit = criteria.max_new_tokens
    criteria.max_new_tokens = limit + 1
    try:
        stopped, reason = original(criteria, *last)
    finally:
        criteria.max_new_tokens = limit
    row.ended = stopped
    if stopped or criteria.current_tokens < limit:
        return stopped, reason
    return True, limit_reached
