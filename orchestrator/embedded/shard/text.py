"""From token ids to text, one token at a time, and when to stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .seam import FinishReason, Stopping

_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Yields the text each token adds.  Holds a token back while it leaves a character incomplete.

    The text of a token depends on what stands before it, so a few earlier tokens are decoded with it.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.ids = list(prompt_ids)
        self._prompt_tokens = len(prompt_ids)
        self._prefix = max(0, len(self.ids) - _CONTEXT_TOKENS)
        self._read = len(self.ids)

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self.ids.append(token_id)
        before = self._decode(self._prefix, self._read)
        after = self._decode(self._prefix, len(self.ids))
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self.ids)
        return after[len(before) :]

    def generated_text(self) -> str:
        """All generated text, special tokens left out."""
        start = max(0, self._prompt_tokens - 1)
        before = self._decode(start, self._prompt_tokens, skip_special=True)
        return self._decode(start, len(self.ids), skip_special=True)[len(before) :]

    def _decode(self, start: int, end: int, *, skip_special: bool = False) -> str:
        text: str = self._tokenizer.decode(self.ids[start:end], skip_special_tokens=skip_special)
        return text


class StopRule:
    """Counts tokens and looks for the end.

    `end_first` tests end-of-sequence and stop strings before the length.  A put leg runs with a
    length of one, where TGI's order would always answer `length`.
    """

    def __init__(self, stopping: Stopping, eos_ids: Collection[int], *, end_first: bool) -> None:
        self.stopping = stopping
        self.tokens = 0
        self._eos_ids = frozenset() if stopping.ignore_eos_token else frozenset(eos_ids)
        self._end_first = end_first
        self._tail = ""
        self._tail_chars = max((len(s) for s in stopping.stop_sequences), default=0) + 256

    def step(self, token_id: int, text: str) -> FinishReason | None:
        """The finish reason after one more token, or None."""
        self.tokens += 1
        self._tail = (self._tail + text)[-self._tail_chars :]
        length: FinishReason | None = "length" if self.tokens >= self.stopping.max_new_tokens else None
        end = self._end(token_id)
        return (end or length) if self._end_first else (length or end)

    def _end(self, token_id: int) -> FinishReason | None:
        if token_id in self._eos_ids:
            return "eos_token"
        if any(self._tail.endswith(stop) for stop in self.stopping.stop_sequences):
            return "stop_sequence"
        return None
