"""Users that talk to TGI's API: chat over several turns, long prompts, code completion."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any, ClassVar

import gevent
from locust import User, task

from .answers import Fault, Reader, read_chat, read_error, read_tgi
from .client import UNREACHED, Client
from .lengths import CHAT, CODE, LONG_PROMPT, Mix, turns
from .server import Server
from .session import Session
from .texts import CODE_STOPS, code, prose, question
from .timing import Reading, outcome

LONGEST_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, before its clock starts."""

    path: str
    body: bytes
    read: Reader


class TgiUser(User):
    """A user with one connection; `session` is set when Locust starts."""

    abstract = True
    session: ClassVar[Session]
    name: ClassVar[str]
    mix: ClassVar[Mix]

    def on_start(self) -> None:
        session = self.session
        self.random = session.random(self.name)
        self.lengths = self.mix.scaled(session.options.length_scale)
        if session.trouble or session.target is None or session.server is None:
            self.stop()
            return
        self.server: Server = session.server
        self.client = Client(session.target)

    def wait_time(self) -> float:
        mean_s = self.session.options.think_s
        return self.random.expovariate(1 / mean_s) if mean_s else 0.0

    def on_stop(self) -> None:
        if not self.session.trouble:
            self.client.close()

    def answer_tokens(self, prompt_tokens: int) -> int:
        """Draws the most tokens that the next answer may have."""
        most = min(
            self.server.limits.answer_tokens(prompt_tokens), int(self.session.options.max_answer_tokens)
        )
        return self.lengths.answer.draw(self.random, most)

    def send(self, request: Request) -> Reading:
        """Sends, reads to the end, records; a refused user may then wait as the server asks."""
        reading, route, retry_after = Reading(request.read), "", None
        headers = {"x-request-id": uuid.uuid4().hex}
        started_s, clock_s = time.time(), time.perf_counter()
        try:
            answer = self.client.post(request.path, request.body, headers)
            route = str(answer.get("x-orchestrator-route") or "")
            retry_after = answer.get("retry-after")
            if answer.status_code == 200:
                for line in self.client.lines(answer):
                    reading.take(line, time.perf_counter() - clock_s)
                reading.end()
            else:
                reading.fault = read_error(answer.status_code, b"".join(self.client.lines(answer)))
        except UNREACHED as error:
            reading.fault = reading.fault or Fault(0, _kind(error), str(error))
        total_s = time.perf_counter() - clock_s
        self.session.record(outcome(self.name, reading, started_s, total_s, route), reading.fault)
        if reading.fault and reading.fault.refused and self.session.options.honour_retry_after:
            gevent.sleep(_seconds(retry_after))
        return reading


def _kind(error: Exception) -> str:
    return "timeout" if isinstance(error, TimeoutError) else "connection"


def _seconds(retry_after: Any) -> float:
    """Of a `Retry-After` in seconds; a second for none and for a date."""
    text = str(retry_after or "")
    return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdecimal() else 1.0


def _generate(prompt: str, max_new_tokens: int, stop: tuple[str, ...] = ()) -> Request:
    parameters: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "details": True}
    if stop:
        parameters["stop"] = list(stop)
    body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    return Request("/generate_stream", body, read_tgi)


class ChatUser(TgiUser):
    """Conversations: each request carries what was said before."""

    abstract = True
    name = "chat"
    mix = CHAT

    def on_start(self) -> None:
        super().on_start()
        self._begin()

    def _begin(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.turns_left = turns(self.random)
        self.history_tokens = 0

    @task
    def turn(self) -> None:
        """One question and its answer."""
        room = self.server.limits.prompt_tokens - self.history_tokens
        asked = self.lengths.prompt.draw(self.random, self.server.limits.prompt_tokens)
        if self.turns_left == 0 or (self.messages and asked > room):
            self._begin()
        text = question(self.random, round(asked * self.server.prose_characters))
        self.messages.append({"role": "user", "content": text})
        reading = self.send(self._request(self.history_tokens + asked))
        if reading.fault:
            self._begin()
            return
        self.messages.append({"role": "assistant", "content": reading.text})
        self.turns_left -= 1
        before = self.history_tokens + asked if reading.prompt_tokens is None else reading.prompt_tokens
        self.history_tokens = before + reading.tokens

    def _request(self, prompt_tokens: int) -> Request:
        body = {
            "model": "tgi",
            "messages": self.messages,
            "max_tokens": self.answer_tokens(prompt_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Request("/v1/chat/completions", json.dumps(body).encode(), read_chat)


class LongPromptUser(TgiUser):
    """A document of thousands of characters and a short answer to it."""

    abstract = True
    name = "long prompt"
    mix = LONG_PROMPT

    @task
    def summarise(self) -> None:
        asked = self.lengths.prompt.draw(self.random, self.server.limits.prompt_tokens)
        text = prose(self.random, round(asked * self.server.prose_characters))
        self.send(_generate(text, self.answer_tokens(asked)))


class CodeUser(TgiUser):
    """An editor that asks for the rest of a function: short answers, ended by a stop sequence."""

    abstract = True
    name = "code"
    mix = CODE

    @task
    def complete(self) -> None:
        asked = self.lengths.prompt.draw(self.random, self.server.limits.prompt_tokens)
        text = code(self.random, round(asked * self.server.code_characters))
        self.send(_generate(text, self.answer_tokens(asked), CODE_STOPS))
