"""What the commands print: status, the banner, progress, and warnings in words."""

from __future__ import annotations

import io
import json
import os
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.banner import banner, curl_line, facts
from orchestrator.deployment.logging import in_words, json_log
from orchestrator.deployment.progress import Lines, Reports
from orchestrator.deployment.state import State
from tgi_patches.contract import Role, ShardSpec

STATUS: dict[str, Any] = {
    "model": "tiny",
    "mode": {
        "level": 0,
        "name": "normal",
        "output_cap": None,
        "shed_below": None,
        "auto": True,
        "set_by": "conductor",
        "reason": "",
    },
    "degraded": None,
    "waiting": 2,
    "open_requests": 3,
    "reserved": {"kv_tokens": 1234, "slots": 5},
    "outstanding": {"records": 6, "bytes": 7},
    "shards": [
        {
            "shard": "prefill-0",
            "role": "prefill",
            "state": "ready",
            "engine": "embedded",
            "hooked": True,
            "note": "",
            "epoch": 1795972620221869567,
            "kv_tokens": 16384,
            "slots": 128,
            "ring_bytes": 10 * 2**20,
            "reserved_kv_tokens": 1234,
            "reserved_slots": 5,
            "outstanding_records": 6,
            "outstanding_bytes": 3 * 2**20,
            "costs": None,
        }
    ],
}
COSTS: dict[str, Any] = {
    "prefill": {"fixed_s": 0.01, "per_token_s": 0.0005, "per_square_s": 0.0},
    "decode": None,
    "relay": {"latency_s": 0.0021, "bytes_per_s": 3 * 2**30},
    "pull": None,
    "figures": {"saturation_tokens": 480, "prefill_tokens_per_s": 1834.2},
}


@contextmanager
def gateway(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server that answers everything with `body`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_status_is_a_table_with_what_is_promised_and_what_there_is() -> None:
    with gateway(200, json.dumps(STATUS).encode()) as url:
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("prefill-0"))
    assert " ".join(row.split()) == (
        "prefill-0 prefill embedded ready 1,234 / 16,384 5 / 128 6 3 / 10 1795972620221869567"
    )
    assert "3 open requests, 2 waiting" in result.stdout
    assert "1,234 KV tokens in 5 slots; 6 outstanding records." in result.stdout


def test_status_tells_of_a_tgi_server_that_is_not_hooked_and_why() -> None:
    shard = {**STATUS["shards"][0], "engine": "TGI", "hooked": False, "note": "TGI [3] is unknown."}
    with gateway(200, json.dumps({**STATUS, "shards": [shard]}).encode()) as url:
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert "prefill-0  prefill  TGI, unhooked  ready" in result.stdout
    assert "prefill-0 serves mixed only: TGI [3] is unknown." in result.stdout


def test_status_says_when_the_deployment_is_degraded() -> None:
    degraded = {**STATUS, "degraded": "No conductor leads: this gateway decides for itself."}
    with gateway(200, json.dumps(degraded).encode()) as url:
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert "No conductor leads: this gateway decides for itself." in result.stdout


def status(told: dict[str, Any]) -> str:
    with gateway(200, json.dumps(told).encode()) as url:
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_status_tells_the_mode_what_it_takes_away_who_set_it_and_why() -> None:
    assert "mode normal\n" in status(STATUS)
    mode = {**STATUS["mode"], "level": 4, "name": "shedding", "output_cap": 128, "shed_below": 0}
    by_itself = status({**STATUS, "mode": {**mode, "reason": "20 % [is] ready."}})
    assert (
        "mode shedding, answers of at most 128 tokens, low priorities refused: 20 % [is] ready." in by_itself
    )
    held = status({**STATUS, "mode": {**mode, "auto": False, "set_by": "operator"}})
    assert "low priorities refused, held by an operator\n" in held


def test_status_shows_what_was_measured_and_leaves_out_what_was_not() -> None:
    assert "measured" not in status(STATUS)
    decode = {
        "decode": {"fixed_s": 0.03, "per_context_s": 0.0, "per_sequence_s": 0.001},
        "figures": {"decode_step_one_ms": 3.125, "decode_step_full_ms": 158.4, "full_batch": 128},
    }
    shard = STATUS["shards"][0]
    shards = [
        {**shard, "costs": COSTS, "batch_requests": 1.5, "batch_tokens": 600.0},
        {**shard, "shard": "decode-0", "costs": {**COSTS, "relay": None, **decode}},
    ]
    rows = [" ".join(line.split()) for line in status({**STATUS, "shards": shards}).splitlines()]
    assert "measured L_m prefill tok/s step of 1 of a full batch relay pull prefill batch" in rows
    assert "prefill-0 480 1,834 2.1 ms, 3.00 GiB/s 1.5 x 400 tokens" in rows
    assert "decode-0 3.12 ms 158 ms (128)" in rows


def test_status_of_a_gateway_that_tells_no_mode_and_no_costs() -> None:
    shard = {name: value for name, value in STATUS["shards"][0].items() if name != "costs"}
    told = {name: value for name, value in STATUS.items() if name != "mode"}
    assert "prefill-0" in status({**told, "shards": [shard]})


def test_status_json_is_what_the_gateway_says_with_its_url() -> None:
    with gateway(200, json.dumps(STATUS).encode()) as url:
        result = CliRunner().invoke(app, ["status", "--json", "--url", url.removeprefix("http://")])
    assert json.loads(result.stdout) == {"url": url, **STATUS}


@pytest.mark.parametrize(("status", "body", "code"), [(404, b"{}", 3), (500, b"", 3), (200, b"<html>", 1)])
def test_a_server_of_another_kind_is_an_error_in_one_sentence(status: int, body: bytes, code: int) -> None:
    with gateway(status, body) as url:
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert result.exit_code == code
    assert len(result.stderr.splitlines()) == 1
    assert url in result.stderr


# --- the banner ---------------------------------------------------------------------------------


def state_of(deployment: str) -> State:
    specs = (
        ShardSpec(deployment, "prefill-0", Role.PREFILL, "/m", "tiny"),
        ShardSpec(deployment, "decode-0", Role.DECODE, "/m", "tiny"),
    )
    return State(deployment, 1, 2, "http://127.0.0.1:3000", "unix:///r", "tiny", "float32", "/a", specs)


def test_the_curl_line_is_one_line_that_a_shell_reads_as_a_streaming_chat() -> None:
    line = curl_line("http://127.0.0.1:3000")
    words = shlex.split(line)
    assert "\n" not in line
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:3000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["stream"] is True
    assert body["temperature"] == 0, "everybody gets the same answer"
    assert body["messages"] == [{"role": "user", "content": "What is the capital of France?"}]


def test_the_banner_says_what_to_try_next_and_how_to_stop() -> None:
    foreground, background = (
        banner(state_of("default"), detached=False),
        banner(state_of("blue"), detached=True),
    )
    assert "http://127.0.0.1:3000 serves tiny in float32 (prefill-0, decode-0)" in foreground
    assert "Ctrl-C" in foreground
    assert " down" not in foreground
    assert " status -d blue " in background
    assert " verify -d blue " in background
    assert " down -d blue " in background
    assert facts(state_of("blue"))["shards"] == ["prefill-0", "decode-0"]


# --- progress and warnings ----------------------------------------------------------------------


def test_plain_progress_tells_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for text in ("Waiting for a", "Waiting for a", "Waiting for b"):
        lines.step(text)
    lines.done("Ready")
    assert capsys.readouterr() == ("", "... Waiting for a\n... Waiting for b\n    Ready\n")


def test_reports_end_quietly_when_the_reader_is_gone() -> None:
    reader, writer = os.pipe()
    reports = Reports(os.fdopen(writer, "w"))
    reports.step("one")
    os.close(reader)
    for _ in range(2):
        reports.done("two")
    reports.close()


def test_reports_are_json_lines() -> None:
    stream = io.StringIO()
    reports = Reports(stream)
    reports.step("one")
    reports.report(error="Bad thing.", code=2)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert told == [{"step": "one"}, {"error": "Bad thing.", "code": 2}]


def test_events_go_to_the_file_and_warnings_are_said_while_the_echo_is_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = structlog.get_config()
    with json_log(tmp_path / "log") as echo:
        log = structlog.get_logger()
        log.warning("shard_lost", shard="decode-0")
        echo.on = True
        log.info("shard_ready", shard="decode-0")
        log.warning("shard_lost", shard="decode-1", code=-9)
    assert structlog.get_config() == before
    written = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["event"], line["shard"]) for line in written] == [
        ("shard_lost", "decode-0"),
        ("shard_ready", "decode-0"),
        ("shard_lost", "decode-1"),
    ]
    assert capsys.readouterr().err == "shard lost: shard decode-1, code -9\n"


def test_an_event_without_facts_is_its_name() -> None:
    assert in_words({"event": "redis_lost", "level": "warning", "timestamp": "now"}) == "redis lost"
