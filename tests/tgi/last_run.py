"""What the last complete run of these tests proved: written beside them, compared by a unit test.

The overlay is only as good as its last run on a real server, which few machines have: a change of
`tgi_patches/` without such a run must not pass.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.tgi.servers import ROOT, STAND_IN
from tgi_patches.hooks.guard import TGI_COMMIT, TGI_VERSION

FILE = Path(__file__).with_name("last_run.json")
OVERLAY = ROOT / "tgi_patches"
ROOTS = ("tgi_patches.entrypoint.text_generation_server", "tgi_patches.hooks.install")
"""What runs in TGI's server process."""
_ASK = """
import json, platform, torch, transformers
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
}))
"""


def overlay_hash(folder: Path = OVERLAY) -> str:
    """SHA-256 over names and contents of all that a server with the overlay imports from `folder`.

    The sidecar, pulls and the container's entrypoint run in other processes and have tests of their own.
    """
    digest = hashlib.sha256()
    for path in sorted(imported(folder, ROOTS)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def imported(folder: Path, roots: Iterable[str]) -> set[Path]:
    """The files of these modules of the package `folder`, and of every one that they import from it."""
    found: set[Path] = set()
    left = list(roots)
    while left:
        for path in _files_of(folder, left.pop()) - found:
            found.add(path)
            left.extend(_named_in(path, folder.name))
    return found


def _files_of(folder: Path, module: str) -> set[Path]:
    """A module's own file and those of the packages around it; nothing for a name inside a module."""
    parts = module.split(".")[1:]
    around = [folder.joinpath(*parts[:count], "__init__.py") for count in range(len(parts) + 1)]
    own = folder.joinpath(*parts).with_suffix(".py") if parts else around[0]
    return {path for path in (*around, own) if path.is_file()}


def _named_in(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def modules() -> set[str]:
    """The names of all test files of this folder."""
    return {path.name for path in Path(__file__).parent.glob("test_*.py")}


def write(python: Path, counts: dict[str, int]) -> None:
    """Record a complete run with `python`."""
    run: dict[str, Any] = {
        "tgi_patches": overlay_hash(),
        "tgi": _tgi(python),
        "counts": counts,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "with": json.loads(_output(python, ["-c", _ASK])),
    }
    FILE.write_text(json.dumps(run, indent=2) + "\n")


def complete(collected: Iterable[str], deselected: int) -> bool:
    """True for a run of every test file, with nothing left out."""
    return not deselected and modules() <= set(collected)


def _tgi(python: Path) -> dict[str, str]:
    asked = subprocess.run(
        [str(python), "-m", "tgi_patches.hooks.guard"],
        env={"PYTHONPATH": f"{ROOT}:{STAND_IN}", "ATTENTION": "flashdecoding-ipex", "PREFIX_CACHING": "0"},
        capture_output=True,
        timeout=120,
    )
    known = asked.returncode == 0
    return {"version": TGI_VERSION, "commit": TGI_COMMIT} if known else {"version": "another", "commit": ""}


def _output(python: Path, arguments: list[str]) -> str:
    return subprocess.check_output([str(python), *arguments], text=True, timeout=120)
