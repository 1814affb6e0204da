"""From generations to TGI's wire format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import answers, tool_answers

from .loop import Timing
from .seam import GeneratedText, Generation, Token
from .service import Answer, Prepared
from .tools import Call, Piece

FINGERPRINT = "tgi-orchestrator-embedded"


@dataclass(frozen=True, slots=True)
class Style:
    """How a chat's answers are dressed."""

    model: str
    logprobs: bool


def token(item: Token) -> answers.Token:
    return answers.Token(id=item.id, text=item.text, logprob=item.logprob, special=item.special)


def tokens(items: Sequence[Token]) -> list[answers.Token]:
    return [token(item) for item in items]


def generate_response(
    prepared: Prepared,
    best: Answer,
    others: list[Answer],
    *,
    prefix: str,
    prefill: list[answers.PrefillToken],
) -> answers.GenerateResponse:
    """Body of `/generate`; `prefix` is the prompt where the client wants the full text.

    `others` are the less likely answers of `best_of`.
    """
    return answers.GenerateResponse(
        generated_text=prefix + ended(best).text,
        details=_details(prepared, best, others, prefix, prefill) if prepared.details else None,
    )


def stream_event(prepared: Prepared, index: int, step: Generation, *, prefix: str) -> answers.StreamEvent:
    """One event of `/generate_stream`; `index` counts from 1."""
    ending = step.generated_text
    return answers.StreamEvent(
        index=index,
        token=token(step.token),
        top_tokens=tokens(step.top_tokens),
        generated_text=None if ending is None else prefix + ending.text,
        details=_stream_details(prepared, ending) if ending is not None and prepared.details else None,
    )


def chat_completion(prepared: Prepared, answer: Answer, style: Style) -> answers.ChatCompletion:
    ending = ended(answer)
    choice = answers.ChatChoice(
        message=answers.ChatMessage(content=ending.text), **_chat_ending(answer, ending, style)
    )
    usage = answers.Usage.of(prepared.prompt_tokens, ending.generated_tokens)
    return answers.ChatCompletion(**_dressed(style.model), choices=[choice], usage=usage)


def tool_completion(
    prepared: Prepared, answer: Answer, style: Style, call: Call
) -> tool_answers.ToolCompletion:
    """TGI numbers the call of a whole answer 0, whatever was called before."""
    ending = ended(answer)
    function = tool_answers.CalledFunction(name=call.name, arguments=call.arguments)
    choice = tool_answers.ToolChoice(
        message=tool_answers.ToolMessage(tool_calls=[tool_answers.ToolCall(function=function)]),
        **_chat_ending(answer, ending, style),
    )
    usage = answers.Usage.of(prepared.prompt_tokens, ending.generated_tokens)
    return tool_answers.ToolCompletion(**_dressed(style.model), choices=[choice], usage=usage)


def chat_chunk(step: Generation, style: Style) -> answers.ChatChunk:
    """One token of a chat stream; special tokens have no text there."""
    delta = answers.ChatMessage(content="" if step.token.special else step.token.text)
    choice = answers.ChatChunkChoice(delta=delta, **_chat_step(step, style))
    return answers.ChatChunk(**_dressed(style.model), choices=[choice])


def tool_chunk(step: Generation, style: Style, call_id: str, piece: Piece) -> tool_answers.ToolChunk:
    function = tool_answers.DeltaFunction(name=piece.name, arguments=piece.arguments)
    delta = tool_answers.ToolDelta(tool_calls=[tool_answers.DeltaToolCall(id=call_id, function=function)])
    choice = tool_answers.ToolChunkChoice(delta=delta, **_chat_step(step, style))
    return tool_answers.ToolChunk(**_dressed(style.model), choices=[choice])


def usage_chunk(prepared: Prepared, generated_tokens: int, *, model: str) -> answers.ChatChunk:
    """The last chunk where the client asked for usage."""
    usage = answers.Usage.of(prepared.prompt_tokens, generated_tokens)
    return answers.ChatChunk(**_dressed(model), choices=[], usage=usage)


def _dressed(model: str) -> dict[str, Any]:
    """What every answer of the OpenAI routes begins with."""
    return {"created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}


def timing_headers(prepared: Prepared, answer: Answer, timing: Timing, received_s: float) -> dict[str, str]:
    """TGI's headers of a non-stream answer; times in whole milliseconds."""
    now = time.monotonic()
    generated = ended(answer).generated_tokens
    inference_s = now - timing.started_s
    milliseconds = {
        "x-total-time": now - received_s,
        "x-validation-time": timing.queued_s - received_s,
        "x-queue-time": timing.started_s - timing.queued_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, generated),
    }
    return {
        "x-compute-type": "cpu",
        "x-compute-time": f"{now - received_s:.6f}",
        "x-compute-characters": str(len(prepared.request.inputs)),
        "x-prompt-tokens": str(prepared.prompt_tokens),
        "x-generated-tokens": str(generated),
        **{name: str(round(seconds * 1000)) for name, seconds in milliseconds.items()},
    }


def ended(answer: Answer) -> GeneratedText:
    assert answer.ending is not None, "an answer is complete when its stream ends"
    return answer.ending


def prefill_tokens(
    prepared: Prepared, answer: Answer, texts: Callable[[Sequence[int]], list[str]]
) -> list[answers.PrefillToken]:
    """`details.prefill`: the prompt's tokens; the first has no log probability."""
    ids = prepared.request.input_ids
    logprobs = (None, *answer.prompt_logprobs)
    if not prepared.request.prefill_logprobs or len(logprobs) != len(ids):
        return []  # TGI's server leaves them out unless it was started to compute them
    triples = zip(ids, texts(ids), logprobs, strict=True)
    return [answers.PrefillToken(id=i, text=text, logprob=logprob) for i, text, logprob in triples]


def _details(
    prepared: Prepared, best: Answer, others: list[Answer], prefix: str, prefill: list[answers.PrefillToken]
) -> answers.Details:
    sequences = [
        answers.BestOfSequence(generated_text=prefix + ended(o).text, **_sequence(prepared, o, prefill))
        for o in others
    ]
    return answers.Details(**_sequence(prepared, best, prefill), best_of_sequences=sequences or None)


def _sequence(prepared: Prepared, answer: Answer, prefill: list[answers.PrefillToken]) -> dict[str, Any]:
    """What `details` and each of its `best_of_sequences` have in common."""
    ending = ended(answer)
    return {
        "finish_reason": ending.finish_reason,
        "generated_tokens": ending.generated_tokens,
        "seed": ending.seed,
        "prefill": prefill,
        "tokens": tokens(answer.tokens),
        "top_tokens": [tokens(top) for top in answer.top_tokens] if prepared.parameters.top_n_tokens else [],
    }


def _stream_details(prepared: Prepared, ending: GeneratedText) -> answers.StreamDetails:
    return answers.StreamDetails(
        finish_reason=ending.finish_reason,
        generated_tokens=ending.generated_tokens,
        seed=ending.seed,
        input_length=prepared.prompt_tokens,
    )


def _chat_ending(answer: Answer, ending: GeneratedText, style: Style) -> dict[str, Any]:
    """What a choice of a whole chat says, be it text or a call."""
    return {
        "logprobs": _chat_logprobs(answer.tokens, answer.top_tokens) if style.logprobs else None,
        "finish_reason": answers.openai_reason(ending.finish_reason),
    }


def _chat_step(step: Generation, style: Style) -> dict[str, Any]:
    """The same of one token."""
    ending = step.generated_text
    return {
        "logprobs": _chat_logprobs([step.token], [step.top_tokens]) if style.logprobs else None,
        "finish_reason": None if ending is None else answers.openai_reason(ending.finish_reason),
    }


def _chat_logprobs(items: Sequence[Token], top: Sequence[Sequence[Token]]) -> answers.ChatLogprobs:
    return answers.ChatLogprobs.of(tokens(items), [tokens(t) for t in top])
