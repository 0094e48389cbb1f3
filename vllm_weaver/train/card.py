# SPDX-License-Identifier: Apache-2.0
"""What an adapter was made from, and the model card that says so.

Knows an adapter's config and metadata, and the figures of an evaluation; measures nothing.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weaver.adapter import describe

if TYPE_CHECKING:
    from vllm_weaver.train.trainer import Trainer

CARD_NAME = "README.md"


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    found = {}
    for name in ("vllm-weaver", "torch", "speculators", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_record(trainer: Trainer) -> dict[str, Any]:
    """What an adapter's metadata says of its training."""
    plan = trainer.plan
    return {
        "step": trainer.step,
        "steps": plan.steps,
        "rows": len(trainer.training_rows),
        "rows_per_step": plan.units * plan.documents,
        "rows_held_out": len(trainer.held_out_rows),
        "rows_skipped": len(trainer.skipped),
        "recipe": trainer.recipe.to_dict(),
        "versions": versions(),
    }


def model_card(adapter: str | Path, results: Mapping[str, Any] | None = None) -> str:
    """The README of a published adapter, in Markdown.

    Args:
        adapter: its directory or file.
        results: what `vllm-weaver evaluate --json` wrote, if it was measured.

    Raises:
        AdapterError: the adapter cannot be loaded.
    """
    facts = describe(adapter)
    record = facts.pop("metadata", {}) or {}
    facts.pop("path", None)
    target, drafter = facts.get("target"), facts.get("drafter")
    lines = ["---", "library_name: vllm-weaver", "tags: [speculative-decoding, vllm, weaver]"]
    if target and "/" in str(target) and not str(target).startswith(("/", ".")):
        lines.append(f"base_model: {target}")
    lines += [
        "---",
        "",
        f"# Weaver adapter for {target or 'a target that is not recorded'}",
        "",
        f"Turns the drafts of the DFlash drafter {drafter or '(not recorded)'} into draft trees "
        "for lossless speculative decoding with [vllm-weaver]"
        "(https://pypi.org/project/vllm-weaver/). The output is the target's own; only the speed "
        "depends on the adapter.",
        "",
        "## The adapter",
        "",
        "| | |",
        "|---|---|",
    ]
    for name, value in facts.items():
        shown = f"{value:,}" if name == "parameters" else value
        lines.append(f"| {name.replace('_', ' ')} | {shown} |")
    lines += ["", "## Training", ""]
    recipe = record.get("recipe")
    if isinstance(recipe, Mapping):
        train = recipe["train"]
        lines += [
            f"Step {record['step']:,} of {record['steps']:,}, {record['rows_per_step']} rows a "
            f"step from {record['rows']:,} rows of `{recipe['data']['path']}` "
            f"({record['rows_held_out']:,} more were held out, {record['rows_skipped']:,} "
            "left out as unreadable).",
            "",
            f"Loss `{train['loss']}` on the drafter's {facts['candidate_pool_size']} best tokens, "
            f"Muon at {train['muon_lr']:g} and AdamW at {train['adam_lr']:g} at their peaks, "
            f"{train['precision']}, seed {train['seed']}.",
            "",
            "Versions: " + ", ".join(f"{k} {v}" for k, v in record["versions"].items()) + ".",
        ]
    else:
        lines.append("Not recorded in this checkpoint.")
    lines += ["", "## Measured acceptance", ""]
    if results is None:
        lines.append("Not measured. `vllm-weaver evaluate` writes these figures.")
    else:
        lines += _results(results)
    lines += [
        "",
        "## Use",
        "",
        "```",
        f"vllm serve {target or 'TARGET'} \\",
        "  --speculative-config "
        f"""'{{"method": "dflash", "model": "{drafter or "DRAFTER"}", """
        """"num_speculative_tokens": 63}' \\""",
        """  --additional-config '{"weaver": {"adapter": "THIS_DIRECTORY"}}'""",
        "```",
        "",
    ]
    return "\n".join(lines)


def write_card(adapter: str | Path, results: Mapping[str, Any] | None = None) -> Path:
    """Write the card beside the adapter's weights."""
    directory = Path(adapter)
    directory = directory if directory.is_dir() else directory.parent
    file = directory / CARD_NAME
    file.write_text(model_card(adapter, results), encoding="utf-8")
    return file


def _results(results: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Tokens per pass of the target, its own token included, on {results['documents']} "
        f"held-out rows of `{results['data']}` ({results['positions']:,} positions; the text is "
        f"the target's most probable token at {results['text_is_best']:.0%} of them). 95 % "
        "intervals over rows.",
        "",
        "| arm | tokens per pass | interval |",
        "|---|---|---|",
    ]
    for name, arm in results["arms"].items():
        low, high = arm["interval"]
        lines.append(f"| {name} | {arm['tokens_per_pass']:.2f} | {low:.2f} to {high:.2f} |")
    return lines
