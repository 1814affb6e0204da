"""A process that behaves like a shard as far as a launcher can see.  The spec's model says how."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, ShardSpec, StatusReply, new_epoch

SPEC = ShardSpec.from_env(os.environ)
EPOCH = new_epoch()


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/crash":
            say("about to crash")
            os._exit(7)
        status = StatusReply(
            protocol=PROTOCOL_VERSION,
            deployment=SPEC.deployment,
            shard=SPEC.shard,
            role=SPEC.role,
            epoch=EPOCH,
            fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
            limits=Limits(4000, 4096),
            kv_tokens=1600,
            slots=4,
            ring_bytes=40_000,
            record_limit_bytes=10_000,
            bytes_per_token=10,
        )
        body = json.dumps(dataclasses.asdict(status)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def main() -> None:
    match SPEC.model:
        case "bad":
            say("loading")
            say("The folder /x holds no model.")
            sys.exit(2)
        case "crash":
            say(f"crash of {SPEC.shard}")
            sys.exit(3)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "parent":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            say(f"child {child.pid}")
        case "hungry":
            held = bytearray()
            while True:
                held += b"x" * 2**20
        case "fills":
            with Path(SPEC.arena_dir, SPEC.shard).open("wb", buffering=0) as arena:
                for _ in range(0, SPEC.arena_bytes, 2**20):
                    arena.write(bytes(2**20))
            say("filled")
        case "chatty":
            line = "x" * 99
            while True:
                say(line)
                time.sleep(0.0005)
        case "environment":
            threads = os.environ["OMP_NUM_THREADS"]
            group = "own" if os.getpgrp() == os.getpid() else "shared"
            session = "own" if os.getsid(0) == os.getpid() else "shared"
            say(f"threads={threads} group={group} session={session} port={SPEC.port}")
    say("serving")
    HTTPServer((SPEC.host, SPEC.port), Status).serve_forever()


main()
