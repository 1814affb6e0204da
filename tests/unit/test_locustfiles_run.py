"""Locust itself, run against a stand-in that speaks as a stock TGI does, in its good and bad moments."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bootstrap import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="needs Locust: pip install '.[load]'"
)
LIMIT_S = 60
OVERLOADED = b'{"error": "Model is overloaded", "error_type": "overloaded"}'
KEY = "a-key-for-load"


def token(index: int, last: bool) -> bytes:
    event = {
        "index": index,
        "token": {"id": index, "text": f" w{index}", "logprob": -0.5, "special": False},
        "generated_text": "w" if last else None,
        "details": {"finish_reason": "length", "generated_tokens": index, "seed": None} if last else None,
    }
    return b"data:" + json.dumps(event).encode() + b"\n\n"


class StockTgi(BaseHTTPRequestHandler):
    """Answers of six tokens; the server's `moods` say what becomes of the next requests instead."""

    protocol_version = "HTTP/1.1"
    server: Stand

    def do_GET(self) -> None:
        assert self.path == "/info"
        self.whole(200, json.dumps({"max_input_tokens": 1000, "max_total_tokens": 1200}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.whole(200, json.dumps([{"id": 1}] * (len(body["inputs"]) // 4)).encode())
            return
        self.server.seen.append((self.path, body, dict(self.headers)))
        mood = self.server.moods.pop(0) if self.server.moods else "well"
        if mood == "full":
            self.whole(429, OVERLOADED)
        else:
            self.stream(mood)

    def stream(self, mood: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if mood == "overload event":
            self.chunk(b"data:" + OVERLOADED + b"\n\n")
        else:
            time.sleep(0.05)
            for index in range(1, 4 if mood == "cut" else 7):
                event = token(index, index == 6)
                # An event in two reads, and a comment in between.
                self.chunk(event[:20])
                self.chunk(event[20:] + b":\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Stand(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StockTgi)
        self.moods: list[str] = []
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []


@pytest.fixture
def stand() -> Iterator[Stand]:
    server = Stand()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def locust(host: str, report: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A second of code completions by one user."""
    line = [sys.executable, "locustfiles/run.py", "--workload", "code", "--host", host, "-u", "1", "-t", "1s"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOCUST_", "LOAD_"))}
    return subprocess.run(
        [*line, "--think-s", "0.05", "--report-dir", str(report), *arguments],
        cwd=ROOT, env=env | {"LOAD_API_KEY": KEY}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_a_run_tells_answers_refusals_and_failures_apart_and_never_shows_the_key(
    stand: Stand, tmp_path: Path
) -> None:
    stand.moods = ["well", "full", "overload event", "cut"]
    done = locust(f"http://127.0.0.1:{stand.server_port}", tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["failed"], told["refused"], told["done"]) == (1, 2, len(stand.seen) - 3)
    assert told["done"] >= 2
    assert told["goodput_share"] == told["done"] / len(stand.seen)
    assert told["ttft_ms"]["p50"] >= 50, "the stand-in waits so long before its first event"
    assert "goodput" in (tmp_path / "summary.txt").read_text()

    failures = (tmp_path / "load_failures.csv").read_text()
    assert "REFUSED,code,RequestFailed('429 overloaded: Model is overloaded')" in failures
    assert "POST,code,RequestFailed('200 cut_off" in failures
    with (tmp_path / "load_stats.csv").open() as file:
        rows = {row["Type"]: int(row["Request Count"]) for row in csv.DictReader(file)}
    # The total counts requests, not what was measured on them.
    assert rows == {
        "POST": told["done"] + 1,
        "REFUSED": 2,
        "TTFT": told["done"],
        "TPOT": told["done"],
        "": told["done"] + 3,
    }
    assert "TPOT" in (tmp_path / "report.html").read_text()

    path, body, headers = stand.seen[0]
    assert path == "/generate_stream"
    assert body["parameters"]["stop"] == ["\ndef ", "\n\n\n"]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert len(headers["x-request-id"]) == 32
    assert KEY not in done.stdout + done.stderr + "".join(p.read_text() for p in tmp_path.iterdir())
