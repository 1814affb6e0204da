"""Rewrites the module tables at the end of architecture.md from the modules' own first sentences.

`python docs/modules.py`; a unit test fails when it would change something.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## Every module in a line\n"
PACKAGES = ("orchestrator", "tgi_patches")
LONGEST = 130


def rewritten(page: str) -> str:
    """`page` with fresh tables below the heading."""
    before, heading, _ = page.partition(HEADING)
    if not heading:
        raise ValueError(f"{PAGE.name} has lost its heading {HEADING.strip()!r}.")
    return before + heading + "".join(_table(folder) for folder in _folders())


def _folders() -> list[Path]:
    return sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})


def _table(folder: Path) -> str:
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if not modules:
        return ""
    rows = "".join(f"| `{path.name}` | {_first_sentence(path)} |\n" for path in modules)
    return f"\n### {folder.relative_to(ROOT)}\n\n| Module | |\n|---|---|\n{rows}"


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    if len(paragraph) > LONGEST:
        paragraph = re.split(r"(?<=[.:;]) ", paragraph)[0]
    return paragraph.rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
