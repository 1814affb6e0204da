"""A long answer as TGI's router makes it, and one of 3,000 tokens to look at.

TGI_PYTHON=... python -m tests.tgi.long_answer [tokens]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import load_settings
from orchestrator.embedded import package
from orchestrator.embedded.shard.seam import Request, Stopping
from orchestrator.embedded.tgi.model import ModelLimits, TgiModel
from tests.tgi.pair import ARENA_BYTES, Models, Prompt, trio
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerPlan, Servers, absolute_python
from tests.tgi.stepping import answers
from tgi_patches.pieces import PIECE_TOKENS

LIMITS = ModelLimits(max_input_tokens=3100, max_total_tokens=4096, max_batch_prefill_tokens=3100)
STORY = "Write a long story about a lighthouse keeper and the sea.\n\nOnce upon a time"


@dataclass(slots=True)
class Said:
    """An answer in pieces."""

    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    """Of each piece's prompt."""


@dataclass(frozen=True, slots=True)
class LongAnswer:
    """One greedy request for `new_tokens`, made in pieces until it has at least so many."""

    models: Models
    tokenizer: Any
    prompt: Prompt
    new_tokens: int
    piece_tokens: int = PIECE_TOKENS

    async def separated(self) -> Said:
        """On the get server, the first piece with a record of the put server."""
        asked = self._piece(self.prompt)
        handle, first = await self.models.put_leg(asked)
        return await self._said(self.models.get, self.models.get_tag(handle, first.token.id))

    async def colocated(self) -> Said:
        return await self._said(self.models.stock, "")

    async def _said(self, model: TgiModel, adapter_id: str) -> Said:
        said, prompt = Said(), self.prompt
        while len(said.tokens) < self.new_tokens:
            asked = self._piece(prompt, adapter_id)
            steps = (await answers(model, [asked]))[asked.id]
            said.tokens += [step.token.id for step in steps]
            said.prompt_tokens.append(len(prompt.ids))
            ending = steps[-1].generated_text
            assert ending is not None
            if ending.finish_reason != "length":
                break
            prompt = prompt_of(self.tokenizer, prompt.text + ending.text)
        return said

    def _piece(self, prompt: Prompt, adapter_id: str = "") -> Request:
        """The router asks for a whole piece each time, whatever is left of the request."""
        stopping = Stopping(min(self.new_tokens, self.piece_tokens), ignore_eos_token=True)
        return self.models.ask(prompt, stopping, adapter_id=adapter_id)


async def main(new_tokens: int) -> int:
    """Print what was imported and computed; exit code 1 where the answers differ."""
    python = absolute_python(os.environ.get("TGI_PYTHON", ""))
    assert python is not None, "TGI_PYTHON names no interpreter"
    model = package.convert(load_settings(None, {}, os.environ).settings.model.cache, lambda _: None)
    tokenizer = tokenizer_of(model)
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(python, Path(folder))
        plan = ServerPlan(model, env={"IPEX_STAND_IN_FREE_MIB": "1000"})
        with trio(servers, plan, python, arena_bytes=4 * ARENA_BYTES) as started:
            async with started.models(LIMITS) as models:
                answer = LongAnswer(models, tokenizer, prompt_of(tokenizer, STORY), new_tokens)
                began_s = time.monotonic()
                separated, colocated = await asyncio.gather(answer.separated(), answer.colocated())
            report = started.get.report
    found = {
        "identical": separated.tokens == colocated.tokens,
        "tokens": len(separated.tokens),
        "prompt_tokens": separated.prompt_tokens,
        "imports": dict(report.imports),
        "imported_tokens": report.imported_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "both_s": round(time.monotonic() - began_s, 1),
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if found["identical"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)))
