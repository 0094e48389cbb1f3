# SPDX-License-Identifier: Apache-2.0
"""Cells of the benchmark (batch x context x temperature), their order and their cost.

Costs are estimates that decide what still fits into the time; what does not is named in the
results, never dropped silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Reference figures of one H200 with a 27 B target in bfloat16 (anchors of the design documents).
_FLOPS = 4.5e14
_BYTES_A_SECOND = 3.4e12


@dataclass(frozen=True)
class Cell:
    """One working point."""

    batch: int
    context: int
    temperature: float

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"b{self.batch}-c{self.context}-t{self.temperature:g}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"cell": self.name, **asdict(self)}


def order_cells(
    batches: Sequence[int],
    contexts: Sequence[int],
    temperatures: Sequence[float],
    most_tokens: int | None = None,
) -> list[Cell]:
    """All combinations of at most so many prompt tokens; the first of each list matter most.

    Temperatures come one after another; within each, a cell's rank is the sum of its places in the
    two other lists, with ties going to the smaller batch, so a budget that ends early has covered
    both a little.
    """
    ranked = [
        (k, i + 2 * j, i, j)
        for i in range(len(batches))
        for j in range(len(contexts))
        for k in range(len(temperatures))
        if most_tokens is None or batches[i] * contexts[j] <= most_tokens
    ]
    return [Cell(batches[i], contexts[j], temperatures[k]) for k, _, i, j in sorted(ranked)]


@dataclass(frozen=True)
class CostModel:
    """Seconds that things take.

    Attributes:
        weight_bytes: of the target.
        start: of an engine.
        step_floor: of a decode step, whatever the model.
    """

    weight_bytes: int
    start: float
    step_floor: float

    def decode(self, cell: Cell, tokens: int) -> float:
        """`tokens` steps of AR, which no arm should exceed by much."""
        step = max(self.step_floor, 1.4 * self.weight_bytes / _BYTES_A_SECOND)
        return tokens * step * (1 + cell.batch / 64)

    def prefill(self, cell: Cell) -> float:
        """One pass over all prompts."""
        return cell.batch * cell.context * self.weight_bytes / _FLOPS

    def cell(self, cell: Cell, tokens: int, engines: int) -> float:
        """One cell on that many engines."""
        return engines * (self.prefill(cell) + self.decode(cell, tokens) + 0.5)
