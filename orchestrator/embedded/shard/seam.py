"""The seam between the scheduling loop and a model, shaped like TGI's gRPC service.

The loop owns requests, budgets and blocks; a model owns weights, KV and running batches.  One
implementation is `model.TransformersModel`; a second one drives TGI's own Python server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.  Neutral values switch a rule off, as in TGI's protocol."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False
    grammar: str = ""
    """A regular expression that the text must follow; empty for none."""


@dataclass(frozen=True, slots=True)
class Stopping:
    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence of a batch.  `slots[p]` is where the KV of logical position p lives."""

    id: int
    inputs: str
    input_ids: tuple[int, ...]
    """The loop's own tokens for `inputs`, truncated; a remote model may tokenize again."""
    sampling: Sampling
    stopping: Stopping
    slots: tuple[int, ...]
    adapter_id: str = ""
    top_n_tokens: int = 0
    add_special_tokens: bool = True
    cache_len: int = 0
    """Tokens whose KV the loop knows to be in `slots` already (prefix caching)."""
    chunk_len: int = 0
    """Prompt tokens to run in the first step; 0 for all (chunked prefill)."""
    prefill_logprobs: bool = False
    """Report the log probability of every prompt token."""


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that begin together."""

    id: int
    requests: tuple[Request, ...]
    wanted: Callable[[], bool] = always
    """False once nobody reads any of them: a model may then give up and yield nothing for them.

    May be called from any thread.
    """


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A running batch, named by the model."""

    id: int
    request_ids: tuple[int, ...]
    current_tokens: int = 0
    """New tokens of its next step: one per request that decodes, a chunk per split prompt."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    generated_tokens: int
    finish_reason: FinishReason
    """`length`, `eos_token` or `stop_sequence`."""
    seed: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One step of one request; `generated_text` is set on its last."""

    request_id: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    generated_text: GeneratedText | None = None
    prompt_logprobs: tuple[float, ...] = ()
    """On the first token, where asked for: of prompt tokens 1, 2, ...; token 0 has none."""
    import_result: str = ""
    """On the first token of a get leg: `hit`, or why the record was not used."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is.  A remote one does not tell everything: 0 and empty are then unknown."""

    model_type: str
    dtype: str
    vocab_size: int
    kv_bytes_per_token: int
    kv_tokens: int
    """Tokens of its pool; 0 until Warmup has measured it, and for a padded model."""
    max_position: int
    block_size: int
    eos_token_ids: tuple[int, ...] = field(default=())
    chunked: bool = False
    """It goes on with split prompts by itself, so the loop must split them and let running requests join."""
    padded: bool = False
    """It pads every row of a batch to the longest and has neither blocks nor slots."""
    prefix_caching: bool = False
    lookahead_tokens: int = 0
    """Positions past a request's end that a step may write (speculation)."""
    attention: str = "embedded"
    device: str = "cpu"


class ShardModel(Protocol):
    """TGI's verbs.  A call that raises fails every request of the batches it was given."""

    async def info(self) -> ModelInfo: ...

    async def warmup(self) -> None: ...

    async def prefill(
        self, batch: Batch, cached: CachedBatch | None = None
    ) -> tuple[list[Generation], CachedBatch | None]:
        """Run the prompts, or their first chunks; a request yields a token once its prompt is complete.

        With chunked prefill the running batch `cached` joins and takes its own step along.
        """
        ...

    async def decode(self, batches: list[CachedBatch]) -> tuple[list[Generation], CachedBatch | None]:
        """Join the batches and run one step: a token for each, or its next chunk of the prompt."""
        ...

    async def filter_batch(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch:
        """Keep only these requests."""
        ...

    async def clear_cache(self, batch_id: int | None = None) -> None:
        """Forget one batch, or all."""
        ...
