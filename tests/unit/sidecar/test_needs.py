"""What a container has to bring along for its sidecar: the standard library, and four packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

BROUGHT = ("uvicorn", "click", "h11", "xxhash")
"""Installed by the Dockerfile."""
IMPORT = """
import importlib, sys

class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in known:
            raise ModuleNotFoundError(f"{name} is not in the container", name=first)

module, *brought = sys.argv[1:]
known = {*sys.stdlib_module_names, *brought, "tgi_patches"}
sys.meta_path.insert(0, Elsewhere())
importlib.import_module(module)
"""


def imported(module: str, *brought: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-c", IMPORT, module, *brought]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr[-500:]


@pytest.mark.parametrize(
    ("module", "brought"),
    [
        ("tgi_patches.sidecar.__main__", BROUGHT),
        ("uvicorn.protocols.http.h11_impl", BROUGHT),  # imported when it serves
        ("tgi_patches.pull.puller", ("xxhash",)),
        ("tgi_patches.pull.server", ("xxhash",)),
        ("tgi_patches.entrypoint.container", ()),
        ("tgi_patches.entrypoint.health", ()),
    ],
)
def test_nothing_else_is_needed(module: str, brought: tuple[str, ...]) -> None:
    assert imported(module, *brought) == (0, "")


def test_what_is_missing_would_show() -> None:
    code, said = imported("uvicorn.protocols.http.h11_impl", "uvicorn", "click")
    assert code == 1
    assert "h11 is not in the container" in said
