# SPDX-License-Identifier: Apache-2.0
"""Shows what `measure` found: tables for a terminal, plots as PNG and SVG, a JSON file.

Knows the results' plain data; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_weaver.train.errors import SaveError, first_line, require

# What each line of a per-depth plot is called, in the order of drawing.
_LINES = {
    "drafter": "drafter's marginals",
    "adapter": "adapter",
    "pool": "mass of the target in the pool",
}


def write_json(result: Mapping[str, Any], file: Path) -> None:
    """Write a result.

    Raises:
        SaveError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{file}: could not be written ({first_line(error)})") from error


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a result as tables."""
    console.print(
        f"{result['documents']} rows of {result['data']}, {result['positions']:,} positions; the "
        f"text is the target's most probable token at {result['text_is_best']:.0%}",
        highlight=False,
    )
    if result["skipped"]:
        console.print(f"{len(result['skipped'])} rows were left out: {result['skipped'][0]}")
    if result["kind"] == "evaluation":
        console.print(_arms(result))
        console.print(_ratios(result))
    console.print(_depths(result))
    if result["kind"] == "diagnosis":
        for line in verdict(result):
            console.print(line, highlight=False)


def show_profile(result: Mapping[str, Any], console: Console) -> None:
    """Print where a training step's time goes."""
    steps, seconds = result["steps"], result["seconds_per_step"]
    busy = result["busy_seconds"] / (steps * seconds)
    console.print(
        f"{seconds * 1e3:.4g} ms a step on {result['processes']} x {result['device']}, of which "
        f"{busy:.0%} in operators; {steps} steps",
        highlight=False,
    )
    for part, title in (
        ("groups", "kind of operator"),
        ("operators", "operator"),
        ("optimisers", "within the step of"),
    ):
        table = _table(title, "ms a step", "of busy time", "of all time")
        for name, row in result[part].items():
            shown = (f"{row['of_busy']:.1%}", f"{row['of_wall']:.1%}")
            table.add_row(name, f"{row['seconds'] / steps * 1e3:.4g}", *shown)
        console.print(table)


def verdict(result: Mapping[str, Any]) -> list[str]:
    """What a diagnosis says, in sentences."""
    lengths = result["expected_length"]
    now, most = lengths["drafter"], lengths["pool"]
    lines = [
        "Expected tokens per pass of a chain (rejection sampling, teacher-forced):",
        f"  the drafter alone {now:.2f}; a perfect adapter on its {result['pool']} best tokens "
        f"{most:.2f}: at most x{most / now:.2f} from scores alone",
    ]
    if "adapter" in lengths:
        lines.append(
            f"  this adapter {lengths['adapter']:.2f}: "
            f"{(lengths['adapter'] - now) / max(most - now, 1e-9):.0%} of that gain"
        )
    ceiling = result.get("marginal_ceiling")
    if ceiling is None:
        lines.append(
            "No prompt is continued more than once here, so drafters in general cannot be bounded: "
            "`vllm-weaver extract --continuations 8` makes such data."
        )
    else:
        last = len(ceiling["to"]) - 1
        lines.append(
            f"No drafter that ignores its own drafts passes {ceiling['from'][1]:.2f} to "
            f"{ceiling['to'][1]:.2f} at depth 2, {ceiling['from'][last]:.2f} to "
            f"{ceiling['to'][last]:.2f} at depth {last + 1} ({ceiling['prompts']} prompts, "
            f"{ceiling['continuations']:g} continuations each): what the pool has beyond that, "
            "only an adapter can win."
        )
    return lines


def plot(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write the result's plots as `STEM-depth` and `STEM-budget`, each as .png and .svg.

    Raises:
        TrainError: matplotlib is not installed, or a file cannot be written.
    """
    matplotlib = require("matplotlib", "drawing plots")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "drawing plots")
    # A fixed salt and no date: the same result gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "vllm-weaver"
    written = []
    figures = {"depth": _plot_depths(pyplot, result)}
    if result["kind"] == "evaluation":
        figures["budget"] = _plot_budgets(pyplot, result)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            for ending, metadata in (("png", None), ("svg", {"Date": None})):
                file = stem.with_name(f"{stem.name}-{name}.{ending}")
                figure.savefig(file, dpi=150, metadata=metadata)
                written.append(file)
    except OSError as error:
        raise SaveError(f"{stem}: plots could not be written ({first_line(error)})") from error
    finally:
        for figure in figures.values():
            pyplot.close(figure)
    return written


def _arms(result: Mapping[str, Any]) -> Table:
    table = _table("arm", "tokens per pass", "95 % interval", "reaches depth 1", "4", "8")
    for name, arm in result["arms"].items():
        low, high = arm["interval"]
        reaches = arm["reaches_depth"]
        shown = [f"{reaches[k]:.2f}" if k < len(reaches) else "" for k in (0, 3, 7)]
        table.add_row(name, f"{arm['tokens_per_pass']:.2f}", f"{low:.2f} to {high:.2f}", *shown)
    return table


def _ratios(result: Mapping[str, Any]) -> Table:
    table = _table("ratio", "value", "95 % interval")
    for name, ratio in result["ratios"].items():
        table.add_row(name, f"{ratio['ratio']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
    return table


def _depths(result: Mapping[str, Any]) -> Table:
    values: dict[str, Sequence[float]] = dict(result["per_depth"])
    ceiling = result.get("marginal_ceiling")
    if ceiling is not None:
        values |= {"ceiling_from": ceiling["from"], "ceiling_to": ceiling["to"]}
    order = ["drafter", "ceiling_from", "ceiling_to", "adapter", "pool", "text_in_pool"]
    order += ["drafter_first_guess", "adapter_first_guess", "target_entropy"]
    names = [name for name in order if name in values]
    table = _table("depth", *(name.replace("_", " ") for name in names))
    for k in range(result["depth"]):
        table.add_row(str(k + 1), *(f"{values[name][k]:.2f}" for name in names))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _plot_depths(pyplot: Any, result: Mapping[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    depths = range(1, result["depth"] + 1)
    for name, label in _LINES.items():
        if name in result["per_depth"]:
            axes.plot(depths, result["per_depth"][name], marker="o", markersize=3, label=label)
    ceiling = result.get("marginal_ceiling")
    if ceiling is not None:
        axes.fill_between(
            depths, ceiling["from"], ceiling["to"], alpha=0.25, label="ceiling of any marginals"
        )
    axes.set(xlabel="draft depth", ylabel="acceptance, 1 - E[TV]", ylim=(0, 1.02))
    axes.legend(frameon=False)
    return figure


def _plot_budgets(pyplot: Any, result: Mapping[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    budgets = result["budgets"]
    for kind, label, ending in (
        ("ddtree", "DDTree", ""),
        ("weaver", "Weaver", ""),
        ("ddtree", "DDTree, shared noise", " shared"),
        ("weaver", "Weaver, shared noise", " shared"),
    ):
        arms = [result["arms"].get(f"{kind} B={budget}{ending}") for budget in budgets]
        if None in arms:
            continue
        middle = [arm["tokens_per_pass"] for arm in arms]
        spread = [
            [m - arm["interval"][0] for m, arm in zip(middle, arms, strict=True)],
            [arm["interval"][1] - m for m, arm in zip(middle, arms, strict=True)],
        ]
        axes.errorbar(budgets, middle, yerr=spread, marker="o", capsize=3, label=label)
    for name, style in (("chain", "--"), ("weaver chain", ":")):
        if name in result["arms"]:
            value = result["arms"][name]["tokens_per_pass"]
            axes.axhline(value, linestyle=style, color="gray", label=name)
    axes.set(xlabel="tree nodes B", ylabel="tokens per target pass", xscale="log")
    axes.set_xticks(budgets, [str(b) for b in budgets])
    axes.minorticks_off()
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    return figure
