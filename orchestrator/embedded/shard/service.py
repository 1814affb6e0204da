"""From a validated body to a running request: tokens, limits, sampling, stop rules."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.core.validation import (
    GenerateRequest,
    ValidParameters,
    check_lengths,
    invalid,
    validate_request,
)
from tgi_patches.contract import ContractError, Limits, parse_tag

from .access import Origin, logged
from .grammar import PatternError, not_valid, pattern_of
from .loop import Loop, Timing
from .seam import GeneratedText, Generation, Request, Sampling, Stopping, Token
from .templates import Templates

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed validation and fits."""

    request: Request
    parameters: ValidParameters
    details: bool = False
    """The client wants `details`."""
    origin: Origin = field(default_factory=Origin)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)


@dataclass(slots=True)
class Answer:
    """Everything one finished request produced."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[tuple[Token, ...]] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    import_result: str = ""
    ending: GeneratedText | None = None

    def add(self, generation: Generation) -> None:
        self.tokens.append(generation.token)
        self.top_tokens.append(generation.top_tokens)
        self.prompt_logprobs = self.prompt_logprobs or generation.prompt_logprobs
        self.import_result = self.import_result or generation.import_result
        self.ending = generation.generated_text

    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.tokens) / max(1, len(self.tokens))


class Service:
    """One model's requests, behind every HTTP route."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        loop: Loop,
        limits: Limits,
        check: Callable[[str], None] | None = None,
        guided: bool = False,
    ) -> None:
        """`check` raises PatternError for an expression that the model cannot follow; None: it follows none.

        `guided`: it is TGI's own server, which checks expressions itself and knows watermarks.
        """
        self.tokenizer = tokenizer
        self.templates = Templates(tokenizer)
        self.loop = loop
        self.limits = limits
        self._check = check
        self._guided = guided

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token on its own."""
        return [self.tokenizer.decode([token_id]) for token_id in ids]

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """(token id, start, stop) in characters of `text`."""
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(token_id, start, stop) for token_id, (start, stop) in pairs]

    async def prepare(self, asked: GenerateRequest, *, stream: bool, origin: Origin) -> Prepared:
        """Validate and tokenize; raises InvalidRequest with TGI's sentence."""
        parameters = validate_request(asked, self.limits, stream=stream)
        self._refuse_unsupported(parameters)
        pattern = ""
        if parameters.grammar is not None:  # in a thread: an expression may take long to compile
            pattern = await asyncio.to_thread(self._pattern, parameters.grammar)
        ids = self.tokenize(asked.inputs, add_special_tokens=asked.add_special_tokens)
        if parameters.truncate is not None:
            ids = ids[-parameters.truncate :]
        if not ids:
            raise invalid("`inputs` cannot be empty")
        max_new_tokens = check_lengths(len(ids), parameters.max_new_tokens, self.limits)
        request = Request(
            id=0,
            inputs=asked.inputs,
            input_ids=tuple(ids),
            sampling=_sampling(parameters, pattern),
            stopping=Stopping(max_new_tokens, parameters.stop, parameters.ignore_eos_token),
            slots=(),
            adapter_id=parameters.adapter_id or "",
            top_n_tokens=parameters.top_n_tokens,
            add_special_tokens=asked.add_special_tokens,
            prefill_logprobs=asked.parameters.decoder_input_details,
        )
        details = asked.parameters.details or asked.parameters.decoder_input_details
        return Prepared(request, parameters, details, origin)

    def stream(self, prepared: Prepared, timing: Timing | None = None) -> AsyncGenerator[Generation]:
        """One Generation a token; closing it cancels the request within one step."""
        steps = self.loop.generate(prepared.request, timing)
        return logged(steps, prepared.origin, prepared.request)

    async def answers(self, prepared: Prepared, timing: Timing) -> list[Answer]:
        """`best_of` answers, each with a seed of its own; the likeliest by mean log probability first."""
        best_of = prepared.parameters.best_of
        if best_of == 1:
            return [await self.answer(prepared, timing)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.answer(_reseeded(prepared), timing)) for _ in range(best_of)]
        return sorted((task.result() for task in tasks), key=Answer.mean_logprob, reverse=True)

    async def answer(self, prepared: Prepared, timing: Timing | None = None) -> Answer:
        answer = Answer()
        async with aclosing(self.stream(prepared, timing)) as generations:
            async for generation in generations:
                answer.add(generation)
        return answer

    def _refuse_unsupported(self, parameters: ValidParameters) -> None:
        if parameters.watermark and not self._guided:
            raise invalid("`watermark` is not supported by the embedded shard")
        try:
            parse_tag(parameters.adapter_id)
        except ContractError as error:
            raise invalid(str(error)) from None

    def _pattern(self, grammar: Any) -> str:
        if self._guided:
            return pattern_of(grammar)
        if self._check is None:
            raise invalid("grammar is not supported")
        pattern = pattern_of(grammar)
        try:
            self._check(pattern)
        except PatternError as error:
            raise not_valid(str(error)) from None
        return pattern


def _reseeded(prepared: Prepared) -> Prepared:
    request = prepared.request
    sampling = replace(request.sampling, seed=secrets.randbits(_SEED_BITS))
    return replace(prepared, request=replace(request, sampling=sampling))


def _sampling(parameters: ValidParameters, pattern: str) -> Sampling:
    seed = parameters.seed
    return Sampling(
        do_sample=parameters.do_sample,
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        typical_p=parameters.typical_p,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        watermark=parameters.watermark,
        grammar=pattern,
    )
