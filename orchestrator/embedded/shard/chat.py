"""`/v1/chat/completions`, as TGI's router answers it: text, or a call of one of the client's tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from orchestrator.api import sse
from orchestrator.api.answers import Outgoing
from orchestrator.api.schemas import ChatRequest
from orchestrator.core.validation import GenerateRequest, invalid

from . import wire
from .access import Origin
from .loop import Timing
from .seam import GeneratedText, Generation
from .service import Answer, Prepared, Service
from .templates import Templates
from .tools import NO_TOOL, CallStream, ToolError, grammar_of, next_id, offered, parse_call


def asked_of(body: ChatRequest, templates: Templates) -> tuple[GenerateRequest, bool]:
    """The prompt and parameters of a chat, and whether its answer calls a tool."""
    if body.has_image:
        raise invalid("images are not supported by the embedded shard")
    if body.response_format is not None and body.tools is not None:
        raise ToolError("Grammar and tools are mutually exclusive")
    parameters = body.to_parameters()
    tools = offered(body.tools, body.tool_choice) if body.tools is not None else []
    prompt = templates.prompt(body.messages, tools, body.tool_prompt or "")
    if tools:
        parameters = replace(parameters, grammar=grammar_of(tools))
    return GenerateRequest(prompt, parameters, add_special_tokens=False), bool(tools)


@dataclass(frozen=True, slots=True)
class Chat:
    """A validated chat."""

    body: ChatRequest
    prepared: Prepared
    calls: bool
    """The text is a call of a tool, or says that the model would rather talk."""
    style: wire.Style

    @classmethod
    async def of(cls, body: ChatRequest, service: Service, origin: Origin, model_id: str) -> Chat:
        asked, calls = asked_of(body, service.templates)
        prepared = await service.prepare(asked, stream=body.stream, origin=origin)
        model = model_id if body.model in (None, "tgi") else str(body.model)
        return cls(body, prepared, calls, wire.Style(model, bool(body.logprobs)))

    async def whole(self, service: Service, timing: Timing) -> tuple[Outgoing, Prepared, Answer]:
        """The body, and what its headers tell of: the generation that the client sees."""
        answer = await service.answer(self.prepared, timing)
        if not self.calls:
            return wire.chat_completion(self.prepared, answer, self.style), self.prepared, answer
        call = parse_call(wire.ended(answer).text)
        if call.name == NO_TOOL:
            return await (await self._talking(service)).whole(service, timing)
        return wire.tool_completion(self.prepared, answer, self.style, call), self.prepared, answer

    async def events(self, service: Service) -> AsyncGenerator[tuple[bytes, str]]:
        """(event, import result), then `[DONE]`."""
        stream = CallStream()
        async with aclosing(self._called(service, stream) if self.calls else self._said(service)) as events:
            async for event in events:
                yield event
        if stream.talks:
            talking = await self._talking(service)
            async with aclosing(talking._said(service)) as events:
                async for event in events:
                    yield event
        yield sse.DONE, ""

    async def _talking(self, service: Service) -> Chat:
        """The same chat without its tools."""
        body = self.body.model_copy(update={"tools": None})
        return await Chat.of(body, service, self.prepared.origin, self.style.model)

    async def _said(self, service: Service) -> AsyncGenerator[tuple[bytes, str]]:
        async with aclosing(service.stream(self.prepared)) as steps:
            async for step in steps:
                yield _event(wire.chat_chunk(step, self.style)), step.import_result
                if step.generated_text is not None and self.body.stream_options.include_usage:
                    yield self._usage(step.generated_text), ""

    async def _called(self, service: Service, stream: CallStream) -> AsyncGenerator[tuple[bytes, str]]:
        """Pieces of a call; ends early where the model would rather talk."""
        call_id = next_id(self.body.messages)
        async with aclosing(service.stream(self.prepared)) as steps:
            async for step in steps:
                piece = stream.push("" if step.token.special else step.token.text)
                if stream.talks:
                    return
                if piece is not None:
                    yield _event(wire.tool_chunk(step, self.style, call_id, piece)), step.import_result
                elif step.generated_text is not None:
                    # TGI sends nothing here, and so never says how a call ended.
                    yield _event(wire.chat_chunk(_silent(step), self.style)), step.import_result
                if step.generated_text is not None and self.body.stream_options.include_usage:
                    yield self._usage(step.generated_text), ""

    def _usage(self, ending: GeneratedText) -> bytes:
        return _event(wire.usage_chunk(self.prepared, ending.generated_tokens, model=self.style.model))


def _event(content: Outgoing) -> bytes:
    return sse.openai_event(content.model_dump())


def _silent(step: Generation) -> Generation:
    return replace(step, token=replace(step.token, text=""))
