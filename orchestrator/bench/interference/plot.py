"""The picture of an interference run: how long a stream waits for its next token, way by way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.bench.interference.run import Result
from orchestrator.errors import ConfigError

_COLOURS = ("#b3541e", "#8a8f98", "#1f6f8b")


def plot(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Write a PNG; ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("The plot needs matplotlib: install the extra `bench`.") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    _bars(left, results, "tpot_p99", "time between tokens of a running stream, p99")
    _bars(right, results, "ttft_p50", "time to first token of an arriving prompt, p50")
    left.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=140)


def _bars(axes: Any, results: Sequence[Result], what: str, title: str) -> None:
    """One group a prefill share, one bar a way, whiskers for the 95 % interval."""
    ways = list(dict.fromkeys(result.way for result in results))
    shown = [result for result in results if getattr(result, what).value_ms is not None]
    shares = list(dict.fromkeys(result.prefill_share for result in shown))
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        mine = [result for result in shown if result.way == way]
        values = [getattr(result, what) for result in mine]
        places = [shares.index(result.prefill_share) + (i - (len(ways) - 1) / 2) * width for result in mine]
        heights = [value.value_ms for value in values]
        below = [value.value_ms - value.low_ms for value in values]
        above = [value.high_ms - value.value_ms for value in values]
        bars = axes.bar(
            places, heights, width * 0.92, label=way, color=_COLOURS[i % 3], yerr=[below, above], capsize=2
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(shares)), [f"{share:.0%} prefill tokens" for share in shares], fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
