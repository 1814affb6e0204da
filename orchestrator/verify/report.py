"""What `verify` prints: a line per case while it runs, a summary, or one JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.verify.ground import Check
from orchestrator.verify.run import Verdict, imports_seen

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Report:
    """The whole outcome.  `problems` are those that belong to no single case."""

    separated_url: str
    reference: str
    model: str
    dtype: str
    tolerance: float
    one_by_one: Sequence[Verdict]
    at_once: int = 1
    all_at_once: Sequence[Verdict] = ()
    shard_imports: Mapping[str, int] | None = None
    """What the shards counted meanwhile, by result; None where they are out of reach."""
    problems: Sequence[str] = ()
    ground: Sequence[Check] = ()
    """What was compared before the answers, with a stock TGI."""
    splits: bool = True

    @property
    def verdicts(self) -> list[Verdict]:
        return [*self.one_by_one, *self.all_at_once]

    @property
    def ok(self) -> bool:
        compared = [verdict for verdict in self.verdicts if not verdict.skipped]
        grounded = all(check.ok for check in self.ground)
        return grounded and bool(compared) and not self.problems and all(v.ok for v in compared)

    def to_dict(self) -> dict[str, Any]:
        needed, hits = imports_seen(self.verdicts)
        counted = None if self.shard_imports is None else dict(self.shard_imports)
        compared = [verdict for verdict in self.verdicts if not verdict.skipped]
        return {
            "ok": self.ok,
            "separated": self.separated_url,
            "reference": self.reference,
            "model": self.model,
            "dtype": self.dtype,
            "logprob_tolerance": self.tolerance,
            "largest_logprob_gap": max((verdict.logprob_gap for verdict in compared), default=0.0),
            "compared": len(compared),
            "identical": sum(verdict.ok for verdict in compared),
            "different": sum(not verdict.ok for verdict in compared),
            "skipped": len(self.verdicts) - len(compared),
            "imports": {"needed": needed, "hits": hits, "counted_by_shards": counted},
            "problems": list(self.problems),
            "splits": self.splits,
            "ground": [dataclasses.asdict(check) | {"ok": check.ok} for check in self.ground],
            "cases": [dataclasses.asdict(verdict) for verdict in self.one_by_one],
            "at_once": {
                "requests_in_flight": self.at_once,
                "cases": [dataclasses.asdict(verdict) for verdict in self.all_at_once],
            },
        }


class Table:
    """One printed row per verdict, as it comes; columns keep their place on a terminal of 100 columns."""

    _ROW = "{:<1} {:<38} {:>6} {:>5}  {:<13} {:<10} {:>8}"

    def __init__(self, console: Console) -> None:
        self._console = console

    def heading(self, title: str, *, columns: bool = True) -> None:
        self._console.print(f"\n[bold]{title}[/]")
        if not columns:
            return
        names = ("", "case", "prompt", "new", "finish", "import", "|Δlogp|")
        self._print(self._ROW.format(*names), "dim")

    def ground(self, check: Check) -> None:
        """Before the answers: a stock TGI and the deployment."""
        mark, style = ("✓", "") if check.ok else ("✗", "red")
        self._print(f"{mark} {check.what:<24} {check.separated:<36} {check.reference}", style)
        if check.problem:
            self._print(f"    {check.problem}", "red")

    def row(self, verdict: Verdict) -> None:
        if verdict.skipped:
            self._print(f"- {verdict.case:<38} skipped: {verdict.skipped}", "yellow")
            return
        cells = (
            "✓" if verdict.ok else "✗",
            verdict.case,
            "" if verdict.prompt_tokens is None else verdict.prompt_tokens,
            verdict.generated_tokens,
            verdict.finish_reason,
            verdict.imported or "-",
            f"{verdict.logprob_gap:.1e}",
        )
        self._print(self._ROW.format(*cells), "" if verdict.ok else "red")
        if verdict.problem:
            self._print(f"    {verdict.problem}", "red")

    def summary(self, report: Report) -> None:
        facts = report.to_dict()
        imports = facts["imports"]
        self._print("", "")
        for problem in report.problems:
            self._print(problem, "red")
        if not facts["compared"]:
            self._print("No answer was compared.", "bold red")
            return
        if not report.splits:
            self._print("This deployment has no pair of prefill and decode: it serves mixed.", "yellow")
        self._print(
            f"{facts['identical']} of {facts['compared']} answers identical to {report.reference}"
            f" ({report.model}, {report.dtype}; logprobs within {report.tolerance:g}, "
            f"largest gap {facts['largest_logprob_gap']:.1e}).",
            "bold green" if report.ok else "bold red",
        )
        self._print(
            f"{imports['hits']} imported records for {imports['needed']} requests of two or more tokens; "
            f"{facts['skipped']} cases skipped.",
            "",
        )

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
