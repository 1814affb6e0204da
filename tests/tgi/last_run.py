"""What the last complete run of these tests proved: written beside them, compared by a unit test.

The overlay is only as good as its last run on a real server, which few machines have: a change of
`tgi_patches/` without such a run must not pass.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.tgi.servers import ROOT, STAND_IN
from tgi_patches.hooks.guard import TGI_COMMIT, TGI_VERSION

FILE = Path(__file__).with_name("last_run.json")
OVERLAY = ROOT / "tgi_patches"
_ASK = """
import json, platform, torch, transformers
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
}))
"""


def overlay_hash(folder: Path = OVERLAY) -> str:
    """SHA-256 over names and contents of all files below `folder`, but for what Python compiled."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


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
