"""From generations to TGI's wire format."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.api import answers

from .loop import Timing
from .seam import GeneratedText, Generation, Token
from .service import Answer, Prepared

FINGERPRINT = "tgi-orchestrator-embedded"


def token(item: Token) -> answers.Token:
    return answers.Token(id=item.id, text=item.text, logprob=item.logprob, special=item.special)


def tokens(items: Sequence[Token]) -> list[answers.Token]:
    return [token(item) for item in items]


def generate_response(
    prepared: Prepared, answer: Answer, *, prefix: str, details: bool
) -> answers.GenerateResponse:
    """Body of `/generate`; `prefix` is the prompt where the client wants the full text."""
    ending = _ended(answer)
    return answers.GenerateResponse(
        generated_text=prefix + ending.text,
        details=_details(prepared, answer, ending) if details else None,
    )


def stream_event(prepared: Prepared, index: int, step: Generation, *, prefix: str) -> answers.StreamEvent:
    """One event of `/generate_stream`; `index` counts from 1."""
    ending = step.generated_text
    return answers.StreamEvent(
        index=index,
        token=token(step.token),
        top_tokens=tokens(step.top_tokens),
        generated_text=None if ending is None else prefix + ending.text,
        details=None if ending is None else _stream_details(prepared, ending),
    )


def chat_completion(
    prepared: Prepared, answer: Answer, *, model: str, logprobs: bool
) -> answers.ChatCompletion:
    ending = _ended(answer)
    return answers.ChatCompletion(
        created=int(time.time()),
        model=model,
        system_fingerprint=FINGERPRINT,
        choices=[
            answers.ChatChoice(
                message=answers.ChatMessage(content=ending.text),
                logprobs=_chat_logprobs(answer.tokens, answer.top_tokens) if logprobs else None,
                finish_reason=_chat_reason(ending),
            )
        ],
        usage=answers.Usage.of(prepared.prompt_tokens, ending.generated_tokens),
    )


def chat_chunk(step: Generation, *, model: str, logprobs: bool) -> answers.ChatChunk:
    """One token of a chat stream; special tokens have no text there."""
    ending = step.generated_text
    return answers.ChatChunk(
        created=int(time.time()),
        model=model,
        system_fingerprint=FINGERPRINT,
        choices=[
            answers.ChatChunkChoice(
                delta=answers.ChatMessage(content="" if step.token.special else step.token.text),
                logprobs=_chat_logprobs([step.token], [step.top_tokens]) if logprobs else None,
                finish_reason=None if ending is None else _chat_reason(ending),
            )
        ],
    )


def usage_chunk(prepared: Prepared, generated_tokens: int, *, model: str) -> answers.ChatChunk:
    """The last chunk where the client asked for usage."""
    return answers.ChatChunk(
        created=int(time.time()),
        model=model,
        system_fingerprint=FINGERPRINT,
        choices=[],
        usage=answers.Usage.of(prepared.prompt_tokens, generated_tokens),
    )


def timing_headers(prepared: Prepared, answer: Answer, timing: Timing, received_s: float) -> dict[str, str]:
    """TGI's headers of a non-stream answer; times in whole milliseconds."""
    now = time.monotonic()
    generated = _ended(answer).generated_tokens
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


def _ended(answer: Answer) -> GeneratedText:
    assert answer.ending is not None, "an answer is complete when its stream ends"
    return answer.ending


def _details(prepared: Prepared, answer: Answer, ending: GeneratedText) -> answers.Details:
    return answers.Details(
        finish_reason=ending.finish_reason,
        generated_tokens=ending.generated_tokens,
        seed=ending.seed,
        tokens=tokens(answer.tokens),
        top_tokens=[tokens(top) for top in answer.top_tokens] if prepared.parameters.top_n_tokens else [],
    )


def _stream_details(prepared: Prepared, ending: GeneratedText) -> answers.StreamDetails:
    return answers.StreamDetails(
        finish_reason=ending.finish_reason,
        generated_tokens=ending.generated_tokens,
        seed=ending.seed,
        input_length=prepared.prompt_tokens,
    )


def _chat_reason(ending: GeneratedText) -> str:
    return answers.openai_reason(ending.finish_reason)


def _chat_logprobs(items: Sequence[Token], top: Sequence[Sequence[Token]]) -> answers.ChatLogprobs:
    return answers.ChatLogprobs.of(tokens(items), [tokens(t) for t in top])
