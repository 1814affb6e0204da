"""Between the seam's facts and TGI's messages.  Pure; fields as TGI's router sets them.

`Message` gives the class of a message by name: only its fields are relied upon, no generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from orchestrator.embedded.shard.seam import (
    Batch,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    Token,
)

Message = Callable[[str], Any]

_WARMUP_WORD = "_test "
_WARMUP_TOP_N = 20
_PADDED_WARMUP_TOKENS = 32


def batch_of(message: Message, batch: Batch, info: ModelInfo) -> Any:
    """`Batch`: requests that begin together."""
    requests = [_request(message, request, info) for request in batch.requests]
    return message("Batch")(
        id=batch.id,
        requests=requests,
        size=len(requests),
        max_tokens=_batch_tokens(batch, info),
        max_blocks=max(len(request.blocks) for request in requests),
    )


def cached_of(message: Message, cached: CachedBatch) -> Any:
    """`CachedBatch`: the server looks it up by its id."""
    return message("CachedBatch")(
        id=cached.id,
        request_ids=cached.request_ids,
        size=len(cached.request_ids),
        current_tokens=cached.current_tokens,
    )


def info_from(reply: Any, kv_tokens: int) -> ModelInfo:
    """What the server says of itself; `kv_tokens` is what its warmup measured."""
    return ModelInfo(
        model_type="",
        dtype=reply.dtype.removeprefix("torch."),
        vocab_size=0,
        kv_bytes_per_token=0,
        kv_tokens=kv_tokens,
        max_position=0,
        block_size=reply.block_size,
        chunked=reply.support_chunking,
        padded=reply.requires_padding,
        prefix_caching=reply.use_prefix_caching and not reply.requires_padding,
        lookahead_tokens=reply.speculate,
        attention=reply.attention_impl,
        device=reply.device_type,
    )


def cached_from(reply: Any) -> CachedBatch:
    return CachedBatch(reply.id, tuple(reply.request_ids), reply.current_tokens)


def generations_from(reply: Any, imports: Mapping[int, str]) -> list[Generation]:
    """Steps in order; `imports` tells by request id what became of its record."""
    return [step for one in reply.generations for step in _steps(one, imports.get(one.request_id, ""))]


def warmup_of(
    message: Message, *, prefill_tokens: int, max_input_tokens: int, max_total_tokens: int, padded: bool
) -> Any:
    """`WarmupRequest`: as many tokens as a step may ever have, in prompts of the longest length.

    Nothing is measured for a padded model, so one short prompt does there.
    """
    budget = _PADDED_WARMUP_TOKENS if padded else prefill_tokens
    lengths = [min(max_input_tokens, budget - taken) for taken in range(0, budget, max_input_tokens)]
    requests = [_warmup_request(message, length, max_total_tokens - length) for length in lengths]
    return message("WarmupRequest")(
        batch=message("Batch")(id=0, requests=requests, size=len(requests), max_tokens=max_input_tokens),
        max_input_tokens=max_input_tokens,
        max_prefill_tokens=prefill_tokens,
        max_total_tokens=max_total_tokens,
    )


def _request(message: Message, request: Request, info: ModelInfo) -> Any:
    sampling, stopping = request.sampling, request.stopping
    made = message("Request")(
        id=request.id,
        inputs=request.inputs,
        input_chunks=_chunks(message, request.inputs),
        # Our own count, not the limit: a server that tokenizes otherwise must not outgrow its slots.
        truncate=len(request.input_ids),
        parameters=message("NextTokenChooserParameters")(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            do_sample=sampling.do_sample,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            watermark=sampling.watermark,
            grammar=sampling.grammar,
            grammar_type="GRAMMAR_TYPE_REGEX" if sampling.grammar else "GRAMMAR_TYPE_NONE",
        ),
        stopping_parameters=message("StoppingCriteriaParameters")(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=stopping.stop_sequences,
            ignore_eos_token=stopping.ignore_eos_token,
        ),
        prefill_logprobs=request.prefill_logprobs,
        top_n_tokens=request.top_n_tokens,
        blocks=[slot // info.block_size for slot in request.slots[:: info.block_size]],
        slots=request.slots,
        cache_len=request.cache_len,
        add_special_tokens=request.add_special_tokens,
    )
    if request.adapter_id:
        made.adapter_id = request.adapter_id
    if info.chunked and 0 < request.chunk_len < _left(request):
        made.chunk_len = request.chunk_len
    return made


def _chunks(message: Message, text: str) -> Any:
    return message("Input")(chunks=[message("InputChunk")(text=text)])


def _left(request: Request) -> int:
    """Prompt tokens whose KV is not there yet."""
    return len(request.input_ids) - request.cache_len


def _batch_tokens(batch: Batch, info: ModelInfo) -> int:
    """What the router calls `max_tokens`: of the first step, and where rows are padded also what follows."""
    if not info.padded:
        return sum(min(request.chunk_len or _left(request), _left(request)) for request in batch.requests)
    longest = max(len(request.input_ids) for request in batch.requests)
    return longest * len(batch.requests) + sum(r.stopping.max_new_tokens for r in batch.requests)


def _warmup_request(message: Message, tokens: int, max_new_tokens: int) -> Any:
    """Sampling rules of every kind are on, so that their memory counts."""
    text = _WARMUP_WORD * tokens
    return message("Request")(
        id=0,
        inputs=text,
        input_chunks=_chunks(message, text),
        truncate=tokens,
        parameters=message("NextTokenChooserParameters")(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
        stopping_parameters=message("StoppingCriteriaParameters")(
            max_new_tokens=max_new_tokens, ignore_eos_token=True
        ),
        prefill_logprobs=True,
        top_n_tokens=_WARMUP_TOP_N,
        add_special_tokens=True,
    )


def _steps(one: Any, import_result: str) -> Iterator[Generation]:
    """Under speculation one message holds several tokens; only the last of them can end the request."""
    tokens = _tokens(one.tokens)
    for index, token in enumerate(tokens):
        first, last = index == 0, index == len(tokens) - 1
        yield Generation(
            request_id=one.request_id,
            token=token,
            top_tokens=_tokens(one.top_tokens[index]) if index < len(one.top_tokens) else (),
            generated_text=_ending(one.generated_text) if last and one.HasField("generated_text") else None,
            prompt_logprobs=tuple(one.prefill_tokens.logprobs[1:]) if first else (),
            import_result=import_result if first else "",
        )


def _tokens(tokens: Any) -> tuple[Token, ...]:
    columns = (tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special)
    return tuple(Token(*column) for column in zip(*columns, strict=True))


def _ending(ending: Any) -> GeneratedText:
    return GeneratedText(
        text=ending.text,
        generated_tokens=ending.generated_tokens,
        finish_reason=_finish_reason(ending),
        seed=ending.seed if ending.HasField("seed") else None,
    )


def _finish_reason(ending: Any) -> FinishReason:
    """By the enum's own names, such as FINISH_REASON_EOS_TOKEN."""
    names = ending.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number
    name = names[ending.finish_reason].name.removeprefix("FINISH_REASON_").lower()
    assert name in get_args(FinishReason), "TGI has three finish reasons"
    return name  # type: ignore[no-any-return]
