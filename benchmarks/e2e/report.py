# SPDX-License-Identifier: Apache-2.0
"""The results of a run as JSON, as a table and as the aims that they meet or miss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_weaver.demo.machine import provenance

from .compare import in_words
from .measure import Grouping, Results, Run

_HOW = {
    Grouping.ALL: "all: every arm's engine takes turns on the device, over one copy of the "
    "target's weights; over_ar is the ratio of rates over interleaved rounds",
    Grouping.PAIRS: "pairs: AR's engine and one arm's take turns on the device; over_ar is the "
    "ratio of rates over interleaved rounds, and ratios between two arms go by way of each one's "
    "own AR",
    Grouping.ALONE: "alone: one engine after another in one run; over_ar compares two stretches of "
    "it",
}
_REAL = {
    True: "expanded models: cost of the large shapes, function and acceptance of the small models",
    False: "the checkpoints named",
}


def content(run: Run, results: Results, seconds: float, keep_outputs: bool) -> dict[str, Any]:
    """Everything that was measured, with what it was measured with."""
    cells = results.cells
    if not keep_outputs:
        cells = [{k: v for k, v in record.items() if k != "outputs"} for record in cells]
    title = f"{run.models.title or run.models.target}, {run.device}, {run.dtype}"
    return {
        **provenance(),
        "title": title,
        "what_is_real": _REAL[run.models.expanded],
        "grouping": _HOW[run.grouping],
        "setting": {
            "models": vars(run.models),
            "device": run.device,
            "dtype": run.dtype,
            "tokens": run.tokens,
            "rounds": run.rounds,
            "discarded_steps_per_turn": run.discard,
            "seed": run.seed,
            "engine_core": "in the process of its arm",
        },
        "seconds": seconds,
        "engines": results.engines,
        "cells": cells,
        "skipped": results.skipped,
        "traces": results.traces,
        "summary": summary(results),
    }


def differing(cells: Sequence[Mapping[str, Any]], *, strict: bool) -> list[str]:
    """What speaks against texts that are AR's but for ties, a line for each cell and arm.

    Any arm's differences beyond a tie do. Those that are not classified do if the arm is ours: AR
    wrote another text when it was asked, and nothing says that they are ties. Those of vLLM's own
    speculation at T > 0, other draws from the same distribution, do only if `strict`. AR's
    differences from itself (`ar_again`) do not, and a cell without `texts` says nothing (T > 0
    where each engine works alone).
    """
    found = []
    for record in cells:
        texts = record.get("texts")
        if texts is None:
            continue
        counts = {"beyond a tie": texts["beyond_a_tie"]}
        if strict or not record["arm"].startswith("stock"):
            counts["not classified"] = texts["not_classified"]
        wrong = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        if wrong:
            found.append(f"{record['cell']} {record['arm']}: differences from AR's texts: {wrong}")
    return found


def lossless(cells: Sequence[Mapping[str, Any]], *, strict: bool) -> bool:
    """Whether texts are AR's but for ties, as far as they can be compared: see `differing`."""
    return not differing(cells, strict=strict)


def summary(results: Results) -> dict[str, Any]:
    """Start-up, memory beyond AR and the figures that the aims name."""
    engines = results.engines
    plain = engines.get("ar", {})
    found: dict[str, Any] = {}
    for name, record in engines.items():
        if "memory" not in record:
            continue
        entry = {"start_seconds": record["start_seconds"], **record["graphs"]}
        memory, base = record["memory"], plain.get("memory")
        if base is not None and name != "ar":
            batch = record["options"]["max_num_seqs"]
            states = memory["state_bytes_per_sequence"] - base["state_bytes_per_sequence"]
            entry["state_bytes_per_sequence_beyond_ar"] = states
            caches = memory.get("cache_bytes_per_sequence", {})
            entry["cache_bytes_per_sequence_beyond_ar"] = {
                tokens: taken - base["cache_bytes_per_sequence"][tokens]
                for tokens, taken in caches.items()
            }
            if "other_bytes" in memory:
                scratch = memory["other_bytes"] - base["other_bytes"]
                entry["scratch_bytes_beyond_ar"] = scratch
                entry["bytes_per_sequence_beyond_ar"] = states + scratch / batch
        found[name] = entry
    return {"engines": found, "outputs_equal_ar": lossless(results.cells, strict=False)}


def markdown(data: Mapping[str, Any]) -> str:
    """A table of all cells."""
    lines = [
        "| cell | arm | tokens/s | ms/step | tokens/pass | per request | over AR | over best stock "
        "| over DDTree | equal to AR | repetition (AR) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in data["cells"]:
        over = record.get("over", {})
        stock = next((x for name, x in over.items() if name.startswith("stock")), None)
        tree = next((x for name, x in over.items() if name.startswith("ddtree")), None)
        length = record["accepted_length"]
        texts = record.get("texts")
        verdict = repeated = "-"
        if texts is not None:
            verdict = in_words(texts, "**{} beyond**")
            repeated = f"{texts['repetition']:.2f} ({texts['repetition_ar']:.2f})"
        again = record.get("ar_again")
        if again is not None:
            verdict = f"itself of {', '.join(again['cells'])}: {in_words(again)}"
        lines.append(
            f"| {record['cell']} | {_name(record)} | {record['tokens_per_second']:.1f} "
            f"| {record['ms_per_step']:.2f} | {length['token_weighted']:.2f} "
            f"| {length['per_request']:.2f} | {_ratio(record.get('over_ar'))} | {_number(stock)} "
            f"| {_number(tree)} | {verdict} | {repeated} |"
        )
    for skip in data["skipped"]:
        lines.append(f"\nNot run: {skip['arm']}, {skip['cell']}: {skip['reason']}.")
    return "\n".join(lines) + "\n"


def _name(record: Mapping[str, Any]) -> str:
    if record["arm"] == "ar" and len(record["with"]) == 1:
        return f"ar, beside {record['with'][0]}"
    return record["arm"]


def _ratio(over: Mapping[str, Any] | None) -> str:
    if not over or not over["ratio"]:
        return "-"
    if over["low"] is None:
        return f"{over['ratio']:.2f}"
    return f"{over['ratio']:.2f} ({over['low']:.2f}-{over['high']:.2f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(
    results: Annotated[Path, typer.Argument(help="an e2e.json")],
    png: Annotated[Path | None, typer.Option(help="draw the picture again")] = None,
) -> None:
    """The table of a finished run, and its picture."""
    data = json.loads(results.read_text())
    typer.echo(markdown(data))
    if png is not None:
        from .plots import plot_cells

        plot_cells(data, png)


if __name__ == "__main__":
    typer.run(main)
