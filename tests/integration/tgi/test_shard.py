"""A whole shard over a fake TGI server: HTTP in front, gRPC behind, two processes, one life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orchestrator.embedded.shard.server import ShardServer, create_app
from orchestrator.embedded.tgi.assemble import opened
from orchestrator.errors import ConfigError, ShardError
from tgi_patches.contract import ShardSpec, StatusReply

LIMIT_S = 60.0
FINGERPRINT = {
    "model": "m",
    "revision": "",
    "tokenizer": "t",
    "dtype": "float32",
    "kv_dtype": "float32",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "attention": "flashdecoding-ipex",
}


@pytest.fixture
def order(fake_python: str, tiny_model: Path, tmp_path: Path) -> Any:
    """Makes the spec of a shard whose server behaves as told."""

    def make(server: dict[str, Any] | None = None, **changes: Any) -> ShardSpec:
        values: dict[str, Any] = {
            "deployment": "test",
            "shard": "mixed-0",
            "role": "mixed",
            "model": str(tiny_model),
            "model_name": "tiny",
            "arena_dir": str(tmp_path / "arenas"),
            "max_input_tokens": 100,
            "max_total_tokens": 120,
            "max_concurrent_requests": 8,
            "cpus": (min(os.sched_getaffinity(0)),),
            "tgi_python": fake_python,
            "tgi_env": {"FAKE_TGI": json.dumps(server or {})},
        }
        return ShardSpec(**values | changes)

    return make


@asynccontextmanager
async def client_of(server: ShardServer) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(server)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shard", timeout=30) as client:
            yield client


async def status_of(client: httpx.AsyncClient) -> StatusReply:
    return StatusReply.from_dict((await client.get("/kv/status")).json())


# --- in this process ---


async def test_requests_are_answered_by_the_server(order: Any) -> None:
    async with opened(order()) as server, client_of(server) as client:
        body = {"inputs": "one two", "parameters": {"max_new_tokens": 3, "details": True, "top_n_tokens": 1}}
        answer = (await client.post("/generate", json=body)).json()
        assert answer["generated_text"] == "<1><2><3>"
        assert [token["id"] for token in answer["details"]["tokens"]] == [1, 2, 3]
        assert [len(top) for top in answer["details"]["top_tokens"]] == [2, 2, 2]
        streamed = (await client.post("/generate_stream", json=body)).text
        assert streamed.count("data:") == 3
        assert '"generated_text":"<1><2><3>"' in streamed


@pytest.mark.parametrize(
    "info",
    [
        {"support_chunking": True},
        {"support_chunking": False},
        {"support_chunking": False, "speculate": 2},
        {"support_chunking": False, "requires_padding": True},
    ],
)
async def test_a_server_gets_what_it_says_that_it_needs(order: Any, info: dict[str, Any]) -> None:
    parameters = {"max_new_tokens": 5, "ignore_eos_token": True}
    body = {"inputs": "one two three four five six", "parameters": parameters}
    spec = order({"info": info}, max_batch_prefill_tokens=4)
    async with opened(spec) as server, client_of(server) as client:
        assert (await client.post("/generate", json=body)).json()["generated_text"] == "<1><2><3><4><5>"


async def test_prompt_logprobs_are_passed_on_and_their_absence_is_no_error(order: Any) -> None:
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 1, "decoder_input_details": True}}
    async with opened(order()) as server, client_of(server) as client:
        prefill = (await client.post("/generate", json=body)).json()["details"]["prefill"]
        assert [token["logprob"] for token in prefill] == [None, -1.0, -2.0]
    async with opened(order({"prompt_logprobs": False})) as server, client_of(server) as client:
        answer = await client.post("/generate", json=body)
        assert answer.json()["details"]["prefill"] == []


async def test_grammars_are_passed_on_as_regular_expressions(order: Any) -> None:
    body: dict[str, Any] = {"inputs": "one", "parameters": {"max_new_tokens": 1, "watermark": True}}
    async with opened(order()) as server, client_of(server) as client:
        body["parameters"]["grammar"] = {"type": "regex", "value": "[0-9]+"}
        assert (await client.post("/generate", json=body)).status_code == 200
        body["parameters"]["grammar"] = {"type": "json", "value": {"properties": {}}}
        assert (await client.post("/generate", json=body)).status_code == 200
        body["parameters"]["grammar"] = {"type": "json", "value": {}}
        refused = await client.post("/generate", json=body)
        assert refused.status_code == 422
        assert "Grammar must have a 'properties' field" in refused.json()["error"]


async def test_a_server_without_the_overlay_serves_mixed_only(order: Any) -> None:
    async with opened(order()) as server, client_of(server) as client:
        status = await status_of(client)
        assert not status.hooked
        assert status.note.endswith("it is starting, or runs without the overlay.")
        assert (status.ring_bytes, status.record_limit_bytes) == (0, 0)
        assert status.kv_tokens == 4 * 120  # four of the longest requests, on a CPU
        assert status.bytes_per_token == 2 * 2 * 2 * 16 * 4
        assert (status.fingerprint.dtype, status.fingerprint.attention) == ("float32", "flashdecoding-ipex")
        info = (await client.get("/info")).json()
        assert (info["router"], info["docker_label"]) == ("tgi-orchestrator-tgi", "tgi-float32")


async def test_the_overlay_s_report_is_the_shard_s_status(order: Any) -> None:
    report = {
        "hooked": True,
        "armed": True,
        "fingerprint": FINGERPRINT,
        "ring_bytes": 4096,
        "record_limit_bytes": 1024,
        "bytes_per_token": 99,
        "imports": {"hit": 3, "missing": 1},
    }
    async with opened(order({"report": report})) as server, client_of(server) as client:
        status = await status_of(client)
        assert (status.hooked, status.note, status.fingerprint.tokenizer) == (True, "", "t")
        assert (status.ring_bytes, status.record_limit_bytes, status.bytes_per_token) == (4096, 1024, 99)
        assert status.imports == {"hit": 3, "missing": 1}
        assert (await client.get("/info")).json()["docker_label"] == "tgi-FlashCausalLM-float32"
        exposed = (await client.get("/metrics")).text
        assert 'orchestrator_kv_imports_total{result="hit"} 3.0' in exposed


async def test_an_overlay_that_refused_says_why(order: Any) -> None:
    report = {"hooked": False, "note": "It is another TGI."}
    async with opened(order({"report": report})) as server, client_of(server) as client:
        status = await status_of(client)
        assert (status.hooked, status.note) == (False, "It is another TGI.")


async def test_the_import_s_result_is_told_in_a_header(order: Any) -> None:
    tag = f"|kv1:get:prefill-0.7:{'0' * 32}:1"
    body = {"inputs": "one", "parameters": {"max_new_tokens": 2, "adapter_id": tag}}
    async with opened(order({"imports": "hit"})) as server, client_of(server) as client:
        for path in ("/generate", "/generate_stream"):
            assert (await client.post(path, json=body)).headers["x-orchestrator-import"] == "hit"


@pytest.mark.parametrize(
    ("server", "changes", "sentence"),
    [
        ({"info": {"dtype": "torch.bfloat16"}}, {}, "serves this model in bfloat16 here, not in float32"),
        ({"supported_tokens": 128}, {}, "has room for 64 tokens, and the longest request needs 120"),
        ({}, {"kv_pool_tokens": 100}, "has room for 100 tokens, and the longest request needs 120"),
        ({}, {"max_total_tokens": 5000}, "is over the model's 4096 positions"),
        ({}, {"dtype": "int8"}, "not in int8"),
        ({}, {"tgi_python": "/no/python"}, "does not exist"),
        ({}, {"model": "/no/model"}, "does not exist"),
    ],
)
async def test_what_cannot_work_is_one_sentence(
    order: Any, server: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        async with opened(order(server, **changes)):
            pass


@pytest.mark.parametrize("busy", [False, True])
async def test_a_server_that_dies_ends_the_shard(
    order: Any, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    told = asyncio.Event()
    monkeypatch.setattr("signal.raise_signal", lambda _: told.set())
    async with opened(order()) as server, client_of(server) as client:
        (child,) = psutil.Process().children()
        if busy:  # the loop is then the first to notice
            body = {"inputs": "one", "parameters": {"max_new_tokens": 2}}
            child.suspend()
            asked = asyncio.create_task(client.post("/generate", json=body))
            while not server.service.loop.running:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        child.kill()
        if busy:
            answer = await asked
            assert answer.status_code == 424
            assert "TGI's server went away (Prefill)" in answer.json()["error"]
        async with asyncio.timeout(LIMIT_S):
            await told.wait()
        assert isinstance(server.failure, ShardError)
        assert str(server.failure).startswith("TGI's server ended (signal 9)")
        assert (await client.get("/health")).status_code == 200


# --- as processes ---


@contextmanager
def shard_process(spec: ShardSpec, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A ready shard and its server."""
    env = {**os.environ, **spec.to_env(), "TMPDIR": str(temporary)}
    shard = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.embedded.shard"], stderr=subprocess.PIPE, text=True, env=env
    )
    assert shard.stderr is not None
    try:
        lines = iter(shard.stderr.readline, "")
        started = next(json.loads(line) for line in lines if "tgi_started" in line)
        assert any("shard_ready" in line for line in lines)
        yield shard, psutil.Process(started["pid"])
    finally:
        shard.kill()
        shard.wait()
        shard.stderr.close()


@pytest.fixture
def temporary() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def test_a_shard_that_is_told_to_stop_leaves_nothing_behind(order: Any, temporary: Path) -> None:
    spec = order(port=free_port())
    with shard_process(spec, temporary) as (shard, server):
        assert [path.name[:17] for path in temporary.iterdir()] == ["tgi-orchestrator-"]
        assert [path.name for path in Path(spec.arena_dir).rglob("*.*")] == ["mixed-0.0.mailbox"]
        shard.terminate()
        assert shard.wait(LIMIT_S) == 0
        server.wait(LIMIT_S)
        assert list(temporary.iterdir()) == []
        assert {path.name for path in Path(spec.arena_dir).rglob("*")} == {"test", "arena-id"}


def test_a_shard_that_is_killed_takes_its_server_along(order: Any, temporary: Path) -> None:
    with shard_process(order(port=free_port()), temporary) as (shard, server):
        shard.kill()
        server.wait(LIMIT_S)


def test_a_server_that_is_killed_takes_its_shard_along_with_a_sentence(order: Any, temporary: Path) -> None:
    with shard_process(order(port=free_port()), temporary) as (shard, server):
        server.send_signal(signal.SIGKILL)
        assert shard.stderr is not None
        last = shard.stderr.read().splitlines()[-1]
        assert shard.wait(LIMIT_S) == 1
        assert last.startswith("TGI's server ended (signal 9)")


def test_without_the_extra_a_sentence_says_what_to_install(order: Any) -> None:
    program = (
        "import sys; sys.modules['grpc'] = None\n"
        "from orchestrator.embedded.shard.__main__ import main; sys.exit(main())"
    )
    env = {**os.environ, **order(port=free_port()).to_env()}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert "needs the package grpc: install tgi-orchestrator[shard,tgi]." in done.stderr


def test_a_shard_that_is_told_to_stop_while_its_server_starts_stops_both(order: Any, temporary: Path) -> None:
    spec = order({"listen_never": True}, port=free_port())
    env = {**os.environ, **spec.to_env(), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "orchestrator.embedded.shard"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as shard:
        assert shard.stderr is not None
        lines = iter(shard.stderr.readline, "")
        server = psutil.Process(next(json.loads(line)["pid"] for line in lines if "tgi_started" in line))
        shard.terminate()
        assert shard.wait(LIMIT_S) == 0
        server.wait(LIMIT_S)
    assert list(temporary.iterdir()) == []


def free_port() -> int:
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])
