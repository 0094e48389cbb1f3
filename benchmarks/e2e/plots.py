# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: speed over AR, tokens per second, and one step's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .timeline import IDLE, OTHER, PATTERNS, Event

_ORDER = [name for name, _ in PATTERNS] + ["drafter", OTHER, IDLE]


def _figure(width: float, height: float, rows: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, 1, figsize=(width, height), squeeze=False, layout="constrained")


def plot_cells(content: Mapping[str, Any], png: Path) -> None:
    """Bars by cell and arm: tokens per second over AR, and the accepted length beside them."""
    cells = list(dict.fromkeys(record["cell"] for record in content["cells"]))
    arms = [arm for arm in content["engines"] if arm != "ar"]
    if not cells or not arms:
        return
    found = {(record["cell"], record["arm"]): record for record in content["cells"]}
    figure, axes = _figure(max(6.0, 1.6 * len(cells)), 6.5, rows=2)
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        places, ratios, low, high, lengths = [], [], [], [], []
        for place, cell in enumerate(cells):
            record = found.get((cell, arm))
            over = (record or {}).get("over_ar") or {}
            if not over.get("ratio"):
                continue
            places.append(place + (number - (len(arms) - 1) / 2) * width)
            ratios.append(over["ratio"])
            low.append(over["ratio"] - (over["low"] or over["ratio"]))
            high.append((over["high"] or over["ratio"]) - over["ratio"])
            lengths.append(record["accepted_length"]["token_weighted"])
        axes[0, 0].bar(places, ratios, width, yerr=[low, high], label=arm, error_kw={"lw": 0.8})
        axes[1, 0].bar(places, lengths, width, label=arm)
    for axis, title in ((axes[0, 0], "tokens/s over AR"), (axes[1, 0], "tokens per target pass")):
        axis.set_xticks(range(len(cells)), cells, rotation=20, ha="right", fontsize=8)
        axis.set_ylabel(title)
        axis.axhline(1.0, color="black", lw=0.8)
        axis.grid(axis="y", alpha=0.3)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", fontsize=8, ncols=4)
    axes[0, 0].set_title(content["title"], fontsize=9)
    figure.savefig(png, dpi=130)


def plot_step(steps: Mapping[str, Sequence[tuple[Event, str]]], png: Path) -> None:
    """One step of each arm: what the device did when, a row per category."""
    shown = {name: events for name, events in steps.items() if events}
    if not shown:
        return
    used = [label for label in _ORDER if any(label == x for v in shown.values() for _, x in v)]
    figure, axes = _figure(11, 0.9 + len(shown) * (0.6 + 0.28 * len(used)), rows=len(shown))
    longest = max(_span(events) for events in shown.values())
    for axis, (name, events) in zip(axes[:, 0], shown.items(), strict=True):
        first = min(event.start for event, _ in events)
        for row, label in enumerate(used):
            bars = [
                ((event.start - first) / 1e3, max(event.duration, 1.0) / 1e3)
                for event, x in events
                if x == label
            ]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row % 10}")
        axis.set_yticks(range(len(used)), used, fontsize=7)
        axis.set_ylim(len(used) - 0.5, -0.5)
        axis.set_xlim(0, longest / 1e3)
        axis.set_title(f"{name}: {_span(events) / 1e3:.2f} ms", fontsize=9, loc="left")
        axis.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(png, dpi=130)


def _span(events: Sequence[tuple[Event, str]]) -> float:
    return max(event.end for event, _ in events) - min(event.start for event, _ in events)
