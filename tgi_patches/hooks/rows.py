"""What the overlay knows of a request while its prompt is not complete, carried by TGI's batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tgi_patches.bridge import FirstToken
from tgi_patches.contract import TOP_TOKENS_MAX, BridgeMiss, MissReason, Tag
from tgi_patches.relay import Imported

TopTokens = tuple[tuple[int, float], ...]
"""(id, logprob), likeliest first."""

_ATTRIBUTE = "_tgi_orchestrator_rows"


@dataclass(slots=True)
class Row:
    """One request with a handle."""

    tag: Tag
    imported: Imported | None = None
    """Of a get leg whose record was used."""
    sampled: tuple[int, float] | None = None
    """Id and logprob of a put leg's first token, once it was sampled."""
    top: TopTokens = ()
    """And the list of likeliest tokens that TGI answers with it, where the request asked for one."""

    ended: bool = False
    """A put leg was complete with its first token."""
    piece: bool = False
    """A get leg that TGI's router will continue when it reaches its limit: its KV is kept then."""

    def first(self) -> FirstToken:
        """What a put leg exports.  Raises BridgeMiss ERROR before the token was sampled."""
        if self.sampled is None:
            raise BridgeMiss(MissReason.ERROR, "the first token was not seen")
        top = self.top if len(self.top) <= TOP_TOKENS_MAX else ()  # the get leg then makes its own list
        return FirstToken(*self.sampled, top)


Rows = dict[int, Row]
"""By TGI's request id."""


def rows_of(batch: Any) -> Rows:
    """The batch's rows; an empty dict of nobody where it has none."""
    rows: Rows = getattr(batch, _ATTRIBUTE, None) or {}
    return rows


def attach(batch: Any, rows: Mapping[int, Row]) -> None:
    """Let `batch` carry rows; nothing is set where there are none."""
    if rows:
        setattr(batch, _ATTRIBUTE, dict(rows))


def carry(source: Iterable[Any], target: Any) -> None:
    """From batches to the one that was made of them: the rows of the requests that it still holds."""
    known = {id_: row for batch in source for id_, row in rows_of(batch).items()}
    if known:
        attach(target, {r.id: known[r.id] for r in target.requests if r.id in known})


def drop(batch: Any, request_ids: Iterable[int]) -> None:
    """Forget rows that are done."""
    rows = rows_of(batch)
    for request_id in request_ids:
        rows.pop(request_id, None)
