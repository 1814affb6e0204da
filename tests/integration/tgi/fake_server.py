"""A gRPC server that behaves as TGI's does towards its router, without a model: token n is number n.

`python fake_server.py` stands in for an interpreter that has TGI: it prints the messages' description for
`-c`, and serves for `-m ... serve MODEL --uds-path UDS`.  FAKE_TGI says how, as JSON; `report` is what the
overlay says after the warmup.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import grpc  # noqa: E402

from tests.integration.tgi.protocol import METHODS, PACKAGE, SERVICE, message, schema  # noqa: E402
from tgi_patches.contract import IMPORTS_METADATA  # noqa: E402


@dataclass
class Row:
    """One request that runs here."""

    request: Any
    left: int
    """Prompt tokens to compute yet."""
    tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.tokens >= self.request.stopping_parameters.max_new_tokens


@dataclass
class FakeTgi:
    """`calls` are (method, request) in order.  Ended requests stay in their batch until it is filtered."""

    info: dict[str, Any] = field(default_factory=dict)
    supported_tokens: int = 6400
    prefill_tokens: int = 1 << 20
    """Of one step at most, as the warmup says."""
    tokens_a_step: int = 1
    fail_with: str = ""
    """The next step ends with this error."""
    hang: asyncio.Event | None = None
    """Steps wait for it."""
    prompt_logprobs: bool = True
    """TGI leaves them out unless it was started with REQUEST_LOGPROBS."""
    imports: str = ""
    """What is told after a Prefill of requests that carry a tag."""
    report: dict[str, Any] | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    batches: dict[int, list[Row]] = field(default_factory=dict)

    async def serve(self, uds: str) -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handlers = {name: self._handler(name) for name in METHODS}
        generic = grpc.method_handlers_generic_handler(f"{PACKAGE}.{SERVICE}", handlers)
        server.add_generic_rpc_handlers((generic,))
        server.add_insecure_port(f"unix:{uds}-0")
        await server.start()
        return server

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    def _handler(self, name: str) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            self.calls.append((name, request))
            self.called.set()
            if name in ("Prefill", "Decode"):
                await self._trouble(context)
            response = getattr(self, f"_{name}".lower())(request, context)
            return message(f"{name}Response")(**response)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=message(f"{name}Request").FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    async def _trouble(self, context: Any) -> None:
        if self.hang is not None:
            await self.hang.wait()
        if self.fail_with:
            error, self.fail_with = self.fail_with, ""
            await context.abort(grpc.StatusCode.INTERNAL, error)

    # --- what TGI's service has ---

    def _info(self, _request: Any, _context: Any) -> dict[str, Any]:
        told = {
            "dtype": "torch.float32",
            "device_type": "cpu",
            "support_chunking": True,
            "attention_impl": "flashdecoding-ipex",
            "block_size": 64,
        }
        return told | self.info

    def _warmup(self, request: Any, _context: Any) -> dict[str, Any]:
        if self.report is not None:
            _write_report(self.report)
        self.prefill_tokens = request.max_prefill_tokens
        limits = {"max_input_tokens": request.max_input_tokens, "max_total_tokens": request.max_total_tokens}
        return limits | (
            {"max_supported_total_tokens": self.supported_tokens} if self.supported_tokens else {}
        )

    def _clearcache(self, request: Any, _context: Any) -> dict[str, Any]:
        if request.HasField("id"):
            self.batches.pop(request.id, None)
        else:
            self.batches.clear()
        return {}

    def _filterbatch(self, request: Any, _context: Any) -> dict[str, Any]:
        rows = self.batches[request.batch_id]
        self.batches[request.batch_id] = [row for row in rows if row.request.id in request.request_ids]
        return {"batch": self._cached(request.batch_id)}

    def _prefill(self, request: Any, context: Any) -> dict[str, Any]:
        batch = request.batch
        for one in batch.requests:
            self._check(one)
        started = [Row(r, r.truncate - (r.chunk_len or r.truncate)) for r in batch.requests]
        batch_id, joined = batch.id, []
        if request.HasField("cached_batch"):
            batch_id = request.cached_batch.id
            joined = self.batches.pop(batch_id)
        if self.imports:
            told = {r.id: self.imports for r in batch.requests if "|kv" in r.adapter_id}
            context.set_trailing_metadata(((IMPORTS_METADATA, json.dumps(told)),))
        return self._stepped(batch_id, joined + started, [row for row in started if row.left])

    def _check(self, request: Any) -> None:
        """TGI would write to other requests' slots, or fail an assertion."""
        told = self._info(None, None)
        if told.get("requires_padding", False):
            assert not request.slots
            return
        needed = request.truncate + request.stopping_parameters.max_new_tokens - 1 + told.get("speculate", 0)
        assert len(request.slots) == needed
        if told["support_chunking"]:
            assert (request.chunk_len or request.truncate) <= self.prefill_tokens
        else:
            assert not request.HasField("chunk_len")

    def _decode(self, request: Any, _context: Any) -> dict[str, Any]:
        rows = [row for batch in request.batches for row in self.batches.pop(batch.id)]
        for row in rows:
            row.left = 0
        return self._stepped(request.batches[0].id, rows, [])

    def _stepped(self, batch_id: int, rows: list[Row], split: list[Row]) -> dict[str, Any]:
        """A generation for every row but those whose prompt is not complete."""
        generations = [self._advanced(row) for row in rows if row not in split]
        if all(row.ended for row in rows):
            return {"generations": generations}
        self.batches[batch_id] = rows
        return {"generations": generations, "batch": self._cached(batch_id)}

    def _cached(self, batch_id: int) -> Any:
        ids = [row.request.id for row in self.batches[batch_id]]
        return message("CachedBatch")(id=batch_id, request_ids=ids, size=len(ids), current_tokens=len(ids))

    def _advanced(self, row: Row) -> Any:
        first = row.tokens + 1
        row.tokens = min(row.tokens + self.tokens_a_step, row.request.stopping_parameters.max_new_tokens)
        ids = range(first, row.tokens + 1)
        generation = message("Generation")(request_id=row.request.id, tokens=_tokens(ids))
        if row.request.top_n_tokens:
            generation.top_tokens.extend(_tokens([i, i + 100]) for i in ids)
        if row.request.prefill_logprobs and self.prompt_logprobs and first == 1:
            prompt = range(row.request.truncate)
            logprobs = [float("nan"), *(-float(i) for i in prompt[1:])]
            generation.prefill_tokens.CopyFrom(message("Tokens")(ids=prompt, logprobs=logprobs))
        if row.ended:
            generation.generated_text.CopyFrom(_ending(row))
        return generation


def _tokens(ids: Any) -> Any:
    return message("Tokens")(
        ids=ids,
        logprobs=[-i / 8 for i in ids],
        texts=[f"<{i}>" for i in ids],
        is_special=[i == 2 for i in ids],
    )


def _ending(row: Row) -> Any:
    text = "".join(f"<{i}>" for i in range(1, row.tokens + 1))
    ending = message("GeneratedText")(
        text=text, generated_tokens=row.tokens, finish_reason="FINISH_REASON_LENGTH"
    )
    if row.request.parameters.do_sample:
        ending.seed = row.request.parameters.seed
    return ending


def _write_report(fields: dict[str, Any]) -> None:
    from tgi_patches.contract import EPOCH_VARIABLE, PROTOCOL_VERSION, ShardSpec
    from tgi_patches.report import Report, report_path, write_report

    spec = ShardSpec.from_env(os.environ)
    known = {
        "protocol": PROTOCOL_VERSION,
        "shard": spec.shard,
        "epoch": int(os.environ[EPOCH_VARIABLE]),
        "rank": 0,
        "world_size": 1,
        "model_class": "FlashCausalLM",
    }
    path = report_path(Path(spec.arena_dir), spec.deployment, spec.shard, 0)
    write_report(path, Report(**known | fields))


async def _serve(uds: str, how: dict[str, Any]) -> None:
    server = await FakeTgi(**how).serve(uds)
    await server.wait_for_termination()


def main(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        sys.stdout.buffer.write(schema())
        return
    how = json.loads(os.environ.get("FAKE_TGI", "{}"))
    if words := how.pop("last_words", ""):
        sys.exit(words)
    if how.pop("listen_never", False):
        signal.pause()
    asyncio.run(_serve(arguments[arguments.index("--uds-path") + 1], how))


if __name__ == "__main__":
    main(sys.argv[1:])
