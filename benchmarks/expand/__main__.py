# SPDX-License-Identifier: Apache-2.0
"""Command: `python -m benchmarks.expand OUT --small DIR --shape 27b`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from .shapes import SHAPES, ShapeError, named, parameters
from .trio import Trio

MODELS = Path(__file__).parents[2] / "vllm_weaver/demo/models"


def expand(
    out: Annotated[Path, typer.Argument(help="directory to write")],
    small: Annotated[
        Path, typer.Option(help="target, drafter, adapter of the small size")
    ] = MODELS,
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "27b",
    layers: Annotated[int | None, typer.Option(help="another number of target layers")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    whole: Annotated[bool, typer.Option(help="write all weights, 54 GB for the 27B")] = False,
    device: Annotated[str, typer.Option(help="where --whole makes them")] = "cpu",
    seed: Annotated[int, typer.Option(help="of the random filling")] = 0,
) -> None:
    """Put a trained small target, drafter and adapter into a large one's shapes."""
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype}: bfloat16 or float32")
    try:
        trio = Trio.below(small, named(shape, layers), seed)
        trio.write(out, getattr(torch, dtype), whole=whole, device=device)
    except ShapeError as error:
        raise typer.BadParameter(str(error)) from error
    counts = parameters(trio.large)
    typer.echo(
        f"{out}: target {counts['target'] / 1e9:.2f} B parameters, drafter "
        f"{counts['drafter'] / 1e9:.2f} B, " + ("whole" if whole else "light")
    )


if __name__ == "__main__":
    typer.run(expand)
