"""TGI's utils.tokens: choosers that take the likeliest token, and the rule by which a request ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.unit.overlay_stand_ins.messages import Request

LENGTH = "length"
EOS = "eos_token"
STOP = "stop_sequence"


def tokens_module() -> Any:
    """With fresh classes, which a test's hooks may wrap."""

    class HeterogeneousNextTokenChooser:
        def __call__(self, _input_ids: Any, logits: Tensor, _speculate: int) -> Any:
            logprobs = torch.log_softmax(logits, -1)
            ids = logits.argmax(-1)
            return ids, logprobs.gather(1, ids.view(-1, 1)).view(-1), logprobs, torch.ones_like(ids), None

    class NextTokenChooser:
        def __call__(self, _input_ids: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = torch.log_softmax(scores, -1)
            return scores[-1].argmax().view(1, 1), logprobs

    class StoppingCriteria:
        """As in TGI, the length is tested first."""

        def __init__(self, request: Request) -> None:
            self.max_new_tokens = request.max_new_tokens
            self.request = request
            self.current_tokens = 0
            self.current_output = ""

        def __call__(self, last_token: int, last_output: str) -> tuple[bool, str | None]:
            self.current_tokens += 1
            if self.current_tokens >= self.max_new_tokens:
                return True, LENGTH
            if not self.request.ignore_eos_token and last_token in self.request.eos_token_ids:
                return True, EOS
            self.current_output += last_output
            if any(self.current_output.endswith(stop) for stop in self.request.stop_sequences):
                return True, STOP
            return False, None

    return SimpleNamespace(
        HeterogeneousNextTokenChooser=HeterogeneousNextTokenChooser,
        NextTokenChooser=NextTokenChooser,
        StoppingCriteria=StoppingCriteria,
        FinishReason=SimpleNamespace(FINISH_REASON_LENGTH=LENGTH),
    )
