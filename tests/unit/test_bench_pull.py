"""The benchmark between hosts measures what it says, on records small enough for a test."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.bench.pull import measure
from orchestrator.bench.pull_others import NotHere, loaded
from orchestrator.bench.pull_peer import memory
from orchestrator.cli import app
from orchestrator.errors import ConfigError

TOKEN_BYTES = 46_080
"""SmolLM2-135M in fp32: 60 planes of 768 bytes."""


def bench_folders() -> set[Path]:
    """What both sides make in memory and must take away again."""
    return set(Path(memory() or tempfile.gettempdir()).glob("tgi-orchestrator-bench-pull-*"))


def test_each_size_is_moved_in_every_way() -> None:
    cores, folders = os.sched_getaffinity(0), bench_folders()
    rows = measure([5 * TOKEN_BYTES + 7, 40 * TOKEN_BYTES], rounds=1, others=())
    assert [(row["kv_bytes"], row["rounds"]) for row in rows] == [(5 * TOKEN_BYTES, 1), (40 * TOKEN_BYTES, 1)]
    assert os.sched_getaffinity(0) == cores
    assert bench_folders() <= folders
    for row in rows:
        left_out = {name for name, value in row.items() if value == "left out"}
        assert left_out == {"gloo_gb_s", "nixl_gb_s", "gloo_over_raw_socket", "nixl_over_raw_socket"}
        assert all(row[name] > 0 for name in row.keys() - left_out)
        speed = row["kv_bytes"] / row["pull_ms"] / 1e6
        assert row["pull_gb_s"] == pytest.approx(speed)
        assert row["pull_over_raw_socket"] == pytest.approx(row["raw_socket_ms"] / row["pull_ms"])


def test_a_library_that_is_not_installed_is_named_so() -> None:
    with pytest.raises(NotHere, match="not installed"):
        loaded("no_such_library_at_all")


def test_without_another_side_it_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConfigError, match=f"No `bench pull --serve` answers at 127.0.0.1:{port}"):
        measure([TOKEN_BYTES], peer=f"127.0.0.1:{port}")


@pytest.mark.parametrize("flag", ["--serve", "--from"])
@pytest.mark.parametrize("text", ["nope", ":7001", "host:", "host:x", "host:65536"])
def test_what_is_no_address_is_one_sentence_that_names_the_flag(flag: str, text: str) -> None:
    done = CliRunner().invoke(app, ["bench", "pull", flag, text])
    assert (done.exit_code, done.output) == (2, f"{flag} must be HOST:PORT, not '{text}'.\n")
