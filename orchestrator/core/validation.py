"""TGI's request validation, sentence for sentence, for the gateway and for the embedded shard.

Follows `router/src/validation.rs` of TGI v3.3.7: same order of checks, same texts.  One deviation:
TGI accepts `max_new_tokens` above 1024 whatever the limit and cuts the answer off; we refuse it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import InvalidRequest
from tgi_patches.contract import Limits


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class GenerateParameters:
    """What a client may ask for, types already checked, nothing else.  None: not given."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: tuple[str, ...] = ()
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Any | None = None
    adapter_id: str | None = None
    ignore_eos_token: bool = False

    @property
    def samples(self) -> bool:
        """True where TGI's server draws from the distribution instead of taking the maximum.

        A warper that changes anything turns sampling on, also without `do_sample`
        (`utils/tokens.py`, NextTokenChooser).
        """
        return (
            self.do_sample
            or self.temperature not in (None, 1.0)
            or self.top_k not in (None, 0)
            or (self.top_p is not None and self.top_p < 1.0)
            or (self.typical_p is not None and self.typical_p < 1.0)
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt with its parameters; a chat becomes one once its template is applied."""

    inputs: str
    parameters: GenerateParameters
    add_special_tokens: bool = True
    """False when a chat template already wrote them."""


@dataclass(slots=True)  # never changed; not frozen, which costs each request three times as much
class ValidParameters:
    """Checked, with TGI's defaults filled in: what an engine runs on."""

    temperature: float
    repetition_penalty: float
    frequency_penalty: float
    top_k: int
    """0: off."""
    top_p: float
    typical_p: float
    do_sample: bool
    """Whether the next token is drawn (also when only a warper asks for it)."""
    max_new_tokens: int | None
    """None: as many as fit (`check_lengths`)."""
    stop: tuple[str, ...]
    truncate: int | None
    watermark: bool
    seed: int | None
    """None: the caller mints one if it samples."""
    top_n_tokens: int
    best_of: int
    grammar: Any | None
    adapter_id: str | None
    ignore_eos_token: bool = False


def validate_parameters(
    params: GenerateParameters, limits: Limits, *, inputs: str | None = None, stream: bool = False
) -> ValidParameters:
    """Check everything that needs no tokenizer; `inputs` None skips the test for an empty prompt.

    Raises InvalidRequest with TGI's sentence for the first rule that is broken.
    """
    _check_best_of(params, limits, stream)
    if (params.best_of or 1) > 1 and not _asks_for_sampling(params):
        raise invalid("you must use sampling when `best_of` is > 1")
    temperature, repetition, frequency = _checked_penalties(params)
    top_p = _checked_share(params.top_p, "top_p")
    typical_p = _checked_share(params.typical_p, "typical_p")
    if params.top_k is not None and params.top_k <= 0:
        raise invalid("`top_k` must be strictly positive")
    if params.max_new_tokens is not None and params.max_new_tokens <= 0:
        raise invalid("`max_new_tokens` must be strictly positive")
    _check_counts(params, limits)
    if inputs == "":
        raise invalid("`inputs` cannot be empty")
    if params.truncate is not None and not 0 < params.truncate <= limits.max_input_tokens:
        raise invalid(
            f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. "
            f"Given: {params.truncate}"
        )
    return ValidParameters(
        temperature=temperature,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        top_k=params.top_k or 0,
        top_p=top_p,
        typical_p=typical_p,
        do_sample=params.samples,
        max_new_tokens=params.max_new_tokens,
        stop=params.stop,
        truncate=params.truncate,
        watermark=params.watermark,
        seed=params.seed,
        top_n_tokens=params.top_n_tokens or 0,
        best_of=params.best_of or 1,
        grammar=params.grammar,
        adapter_id=params.adapter_id,
        ignore_eos_token=params.ignore_eos_token,
    )


def validate_request(request: GenerateRequest, limits: Limits, *, stream: bool = False) -> ValidParameters:
    """`validate_parameters` for a whole request, its prompt included."""
    return validate_parameters(request.parameters, limits, inputs=request.inputs, stream=stream)


class BatchTooLarge(InvalidRequest):
    error_type = "batch size exceeded"


def check_batch(prompts: int, limits: Limits) -> None:
    """How many prompts one body may carry; raises BatchTooLarge."""
    if prompts > limits.max_client_batch_size:
        most = limits.max_client_batch_size
        raise BatchTooLarge(f"Number of prompts exceeds the maximum allowed batch size of {most}")


def check_lengths(prompt_tokens: int, max_new_tokens: int | None, limits: Limits) -> int:
    """The number of tokens to generate at most; raises InvalidRequest when it cannot fit.

    `prompt_tokens` is counted after truncation.  Without `max_new_tokens` the answer may fill the
    limit, as in TGI 3.3.
    """
    room = max(0, limits.max_total_tokens - prompt_tokens)
    new_tokens = room if max_new_tokens is None else max_new_tokens
    if prompt_tokens + new_tokens > limits.max_total_tokens:
        raise invalid(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {prompt_tokens} `inputs` tokens and {new_tokens} `max_new_tokens`"
        )
    if prompt_tokens > limits.max_input_tokens:
        raise invalid(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
        )
    return new_tokens


def surely_fits(prompt_tokens_bound: int, max_new_tokens: int | None, limits: Limits) -> bool:
    """True when no prompt of at most that many tokens can break a limit.

    An open-ended answer must have room for two tokens, so that it is not over at its first.
    """
    new_tokens = 2 if max_new_tokens is None else max_new_tokens
    return (
        prompt_tokens_bound <= limits.max_input_tokens
        and prompt_tokens_bound + new_tokens <= limits.max_total_tokens
    )


def chat_parameters(
    *,
    model: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    top_logprobs: int | None = None,
    grammar: Any | None = None,
) -> GenerateParameters:
    """A chat's fields as TGI maps them (lib.rs, try_into_generate).

    Only `temperature` 0 is greedy; `presence_penalty` p becomes a repetition penalty of p + 2, as
    odd as that is; a `model` other than "tgi" travels as the adapter.
    """
    greedy = temperature == 0.0
    return GenerateParameters(
        temperature=None if greedy else temperature,
        repetition_penalty=None if presence_penalty is None else presence_penalty + 2.0,
        frequency_penalty=frequency_penalty,
        top_p=top_p,
        do_sample=not greedy,
        max_new_tokens=max_tokens,
        stop=tuple(stop),
        details=True,
        seed=seed,
        top_n_tokens=top_logprobs,
        grammar=grammar,
        adapter_id=None if model == "tgi" else model,
    )


def invalid(reason: str) -> InvalidRequest:
    """TGI's wording of a validation error."""
    return InvalidRequest(f"Input validation error: {reason}")


def _check_best_of(params: GenerateParameters, limits: Limits, stream: bool) -> None:
    best_of = 1 if params.best_of is None else params.best_of
    if stream:
        if best_of != 1:
            raise invalid("`best_of` != 1 is not supported when streaming tokens")
        if params.decoder_input_details:
            raise invalid("`decoder_input_details` == true is not supported when streaming tokens")
    elif best_of > 1:
        if limits.max_best_of == 1:
            raise invalid("`best_of` != 1 is not allowed for this endpoint")
        if best_of > limits.max_best_of:
            raise invalid(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def _asks_for_sampling(params: GenerateParameters) -> bool:
    given = (params.temperature, params.top_k, params.top_p, params.typical_p)
    return params.do_sample or any(value is not None for value in given)


def _checked_penalties(params: GenerateParameters) -> tuple[float, float, float]:
    temperature = 1.0 if params.temperature is None else _float32(params.temperature)
    if not temperature > 0.0:
        raise invalid("`temperature` must be strictly positive")
    repetition = 1.0 if params.repetition_penalty is None else _float32(params.repetition_penalty)
    if not repetition > 0.0:
        raise invalid("`repetition_penalty` must be strictly positive")
    frequency = 0.0 if params.frequency_penalty is None else _float32(params.frequency_penalty)
    if not -2.0 <= frequency <= 2.0:
        raise invalid("`frequency_penalty` must be >= -2.0 and <= 2.0")
    return temperature, repetition, frequency


def _checked_share(value: float | None, name: str) -> float:
    if value is None:
        return 1.0
    share = _float32(value)
    if not 0.0 < share < 1.0:
        raise invalid(f"`{name}` must be > 0.0 and < 1.0")
    return share


def _check_counts(params: GenerateParameters, limits: Limits) -> None:
    if len(params.stop) > limits.max_stop_sequences:
        raise invalid(
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(params.stop)}"
        )
    if params.seed is not None and (params.best_of or 1) > 1:
        raise invalid("`seed` must not be set when `best_of` > 1")
    if (params.top_n_tokens or 0) > limits.max_top_n_tokens:
        raise invalid(
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {params.top_n_tokens}"
        )


def _float32(value: float) -> float:
    """As TGI's router reads it: what underflows to 0 in float32 is 0 there, and refused."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
