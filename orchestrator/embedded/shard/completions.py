"""`/v1/completions`: one answer per prompt, whole or as interleaved events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from orchestrator.api import answers, sse
from orchestrator.api.schemas import CompletionRequest
from orchestrator.core.validation import GenerateRequest, invalid
from orchestrator.errors import GatewayError

from .access import Origin
from .loop import Timing
from .seam import Generation
from .service import Answer, Prepared, Service
from .wire import FINGERPRINT

Arrived = asyncio.Queue[tuple[bytes, str] | GatewayError | None]
"""Events with their import result; None when a prompt is done."""


@dataclass(frozen=True, slots=True)
class Completions:
    """A validated request: one prepared sequence per prompt."""

    model: str
    prepared: list[Prepared]

    @classmethod
    async def of(
        cls, body: CompletionRequest, service: Service, origin: Origin, model_id: str
    ) -> Completions:
        if body.suffix is not None:
            raise invalid("`suffix` is not supported: put it into the prompt")
        prompts, most = body.prompts(), service.limits.max_client_batch_size
        if not 0 < len(prompts) <= most:
            raise invalid(f"`prompt` takes 1 to {most} prompts. Given: {len(prompts)}")
        parameters = body.to_parameters()
        prepared = [
            await service.prepare(GenerateRequest(prompt, parameters), stream=body.stream, origin=origin)
            for prompt in prompts
        ]
        return cls(model_id if body.model in (None, "tgi") else str(body.model), prepared)

    async def whole(self, service: Service, timing: Timing) -> answers.Completion:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.answer(item, timing)) for item in self.prepared]
        found = [task.result() for task in tasks]
        prompt_tokens = sum(item.prompt_tokens for item in self.prepared)
        generated = sum(len(answer.tokens) for answer in found)
        return answers.Completion(
            created=int(time.time()),
            model=self.model,
            system_fingerprint=FINGERPRINT,
            choices=[_choice(index, answer) for index, answer in enumerate(found)],
            usage=answers.Usage.of(prompt_tokens, generated),
        )

    async def events(self, service: Service) -> AsyncGenerator[tuple[bytes, str]]:
        """(event, import result) of all prompts as they come, then `[DONE]`."""
        arrived: Arrived = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._one(service, index, arrived)) for index in range(len(self.prepared))
        ]
        try:
            left = len(tasks)
            while left:
                item = await arrived.get()
                if isinstance(item, GatewayError):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
            yield sse.DONE, ""
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, service: Service, index: int, arrived: Arrived) -> None:
        prepared = self.prepared[index]
        try:
            async with aclosing(service.stream(prepared)) as steps:
                async for step in steps:
                    event = sse.openai_event(self._event(index, prepared, step))
                    arrived.put_nowait((event, step.import_result))
        except GatewayError as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    def _event(self, index: int, prepared: Prepared, step: Generation) -> dict[str, object]:
        ending = step.generated_text
        reason = "" if ending is None else ending.finish_reason
        choice = answers.CompletionChoice(index=index, text=step.token.text, finish_reason=reason)
        chunk = answers.CompletionChunk(
            created=int(time.time()), model=self.model, system_fingerprint=FINGERPRINT, choices=[choice]
        )
        if ending is None:
            return chunk.model_dump()
        usage = answers.Usage.of(prepared.prompt_tokens, ending.generated_tokens)
        return answers.Completion(**chunk.model_dump(), usage=usage).model_dump()


def _choice(index: int, answer: Answer) -> answers.CompletionChoice:
    assert answer.ending is not None, "an answer is complete when its stream ends"
    ending = answer.ending
    return answers.CompletionChoice(index=index, text=ending.text, finish_reason=ending.finish_reason)
