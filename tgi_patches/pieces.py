"""Long answers, which TGI's router makes in pieces.

At 1,024 new tokens it ends the request in the server and sends another one, whose prompt is the text so
far, with the same adapter and so the same handle (router/src/infer/mod.rs).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PIECE_TOKENS = 1024
"""TGI's DEFAULT_GENERATION_LENGTH (router/src/validation.rs)."""
REMEMBERED_MAX = 16_384
"""Get legs of which so many others were seen later are taken for new: more than begin during one piece."""


class Begun:
    """With which prompt each get leg began, so that its continuation is told from a second try."""

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._most = most
        self._prompts: OrderedDict[str, int] = OrderedDict()

    def continues(self, handle: str, token_ids: Sequence[int]) -> bool:
        """True when `handle` was seen before with another prompt; the first one is remembered."""
        prompt = hash(tuple(token_ids))
        first = self._prompts.setdefault(handle, prompt)
        self._prompts.move_to_end(handle)
        if len(self._prompts) > self._most:
            self._prompts.popitem(last=False)
        return first != prompt
