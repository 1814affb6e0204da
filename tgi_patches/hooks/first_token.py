"""The first token of a request: noted in a put leg's step, forced in a get leg's.

Tensors as TGI's choosers return them: ids [batch], logprobs [batch], all logprobs [batch, vocab].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tgi_patches.contract import GetTag, PutTag
from tgi_patches.hooks.rows import Row

PerRow = list[list[list[Any]]]
"""What TGI's batch_top_tokens returns: by row of the batch, by accepted token, ids or logprobs."""


def settle(row: Row, index: int, ids: Tensor, logprobs: Tensor, all_logprobs: Tensor) -> None:
    """Note what row `index` sampled, or let it have sampled what its handle says."""
    if isinstance(row.tag, PutTag):
        row.sampled = (int(ids[index]), float(logprobs[index]))
    elif (first := forced(row, all_logprobs[index])) is not None:
        ids[index], logprobs[index] = first


def forced(row: Row, logprobs: Tensor) -> tuple[int, float] | None:
    """Id and logprob with which a get leg begins; `logprobs` [vocab] are this server's own."""
    if row.imported is not None:
        return row.imported.first.id, row.imported.first.logprob
    if isinstance(row.tag, GetTag) and row.tag.first_token_id is not None:
        return row.tag.first_token_id, float(logprobs[row.tag.first_token_id])
    return None


def settle_top(
    rows: Iterable[tuple[int, Row]], top_n: Sequence[int], ids: PerRow, logprobs: PerRow
) -> tuple[PerRow, PerRow]:
    """Note the lists of put legs; those of get legs become the exported ones.

    As TGI made them: it adds tokens that tie with the n-th, in an order of its own.
    """
    ids, logprobs = list(ids), list(logprobs)
    for index, row in rows:
        if not top_n[index]:
            continue
        if isinstance(row.tag, PutTag):
            row.top = tuple(zip(ids[index][0], logprobs[index][0], strict=True))
        elif row.imported is not None and row.imported.first.top:
            exported = row.imported.first.top
            ids[index] = [[token_id for token_id, _ in exported]]
            logprobs[index] = [[logprob for _, logprob in exported]]
    return ids, logprobs


def ended(model: Any, criteria: Any, all_input_ids: list[int], prompt_tokens: int, token_id: int) -> bool:
    """True when a request is complete with its first token, whatever its length limit says.

    TGI tests the length first, so a put leg of one token always ends with `length`.
    """
    if not criteria.ignore_eos_token and token_id in criteria.eos_token_ids:
        return True
    if not criteria.stop_sequence_criterias:
        return False
    text, _, _ = model.decode_token(all_input_ids, prompt_tokens - 5, prompt_tokens)
    return any(criterion(text) for criterion in criteria.stop_sequence_criterias)
