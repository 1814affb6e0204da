"""What runs without the extra `shard` must not load torch, not even through a library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "accelerate", "gguf"}
SHOW = "import json, sys; __import__(sys.argv[1]); print(json.dumps(sorted(sys.modules)))"


def loaded_by(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW, module], capture_output=True, text=True, timeout=60, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "module",
    [
        "tgi_patches",
        "tgi_patches.contract",
        "tgi_patches.bridge",
        "tgi_patches.sidecar",
        "tgi_patches.pull.puller",
        "tgi_patches.pull.server",
        "orchestrator.api.app",
        "orchestrator.cli",
        "orchestrator.commands.up",
        "orchestrator.commands.serve",
        "orchestrator.embedded.weights",
        "orchestrator.embedded.redis",
    ],
)
def test_importing_it_loads_no_heavy_library(module: str) -> None:
    assert loaded_by(module) & HEAVY == set()


def test_the_check_sees_a_heavy_library_where_there_is_one() -> None:
    assert "torch" in loaded_by("tgi_patches.kv.in_place")


def test_the_contract_loads_the_standard_library_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"tgi_patches"}
    at_start = loaded_by("sys")
    assert loaded_by("tgi_patches.contract") - allowed - at_start == set()
