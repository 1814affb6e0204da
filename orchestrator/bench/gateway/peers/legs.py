"""Both Python peers do the same two calls as `vllm-router`: a prefill of one token, then the request itself.

The body of the put leg asks for one token, whole; what prefill says of its KV goes with the get leg.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

PUT_PATH = {"/generate_stream": "/generate"}
PASSED_ON = ("content-type", "cache-control", "x-prompt-tokens", "x-generated-tokens")
"""Headers of the decode shard that the client sees."""
_PULL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Shards:
    """Base URLs."""

    prefill: str
    decode: str


def put_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token."""
    if "inputs" in body:
        return {**body, "parameters": {**body.get("parameters", {}), "max_new_tokens": 1}}
    return {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": _PULL}


def get_body(body: Mapping[str, Any], put_answer: Mapping[str, Any]) -> dict[str, Any]:
    """The request itself, with where its KV stands."""
    transfer = put_answer.get("kv_transfer_params")
    return {**body, "kv_transfer_params": transfer} if transfer else dict(body)


def arguments(description: str | None) -> tuple[int, Shards]:
    """Port and shards from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, help="base URL")
    parser.add_argument("--decode", required=True, help="base URL")
    given = parser.parse_args()
    return given.port, Shards(given.prefill, given.decode)


def serve(app: Any, port: int) -> None:
    """As a good engineer runs a gateway: uvicorn with its quickest loop and parser, and no log."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=4096,
    )
