# SPDX-License-Identifier: Apache-2.0
"""Arguments of a weave's kernels that go together: tensors on the host, pointers in a kernel.

A kernel takes each of these as one argument. Triton passes and specialises their members one by
one; a member that is None is known to be so when the kernel is compiled.

Shape legend as in `weave.triton`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """What a kernel is compiled for, letters as in the legend; EB inputs are read at a time."""

    T: int
    W: int
    D: int
    G: int
    E: int
    EB: int
    P: int
    C: int
    F: int


class ByDepth(NamedTuple):
    """An array [R, D, *] with unit stride in its last axis, and its other strides."""

    start: Any
    stride_r: Any
    stride_d: Any

    @classmethod
    def of(cls, x_RDX: Tensor) -> ByDepth:
        """The argument for a tensor."""
        return cls(x_RDX, *x_RDX.stride()[:2])


class Noise(NamedTuple):
    """The sampler's noise for all candidates, and how requests sample, as in `ops.noise.drawn`.

    | name | shape, dtype |
    |---|---|
    | `noise` | `ByDepth` of [R, D, P] float32 |
    | `temperature`, `top_p`, `min_p` | [R] float32 |
    | `top_k` | [R] int32 |
    """

    noise: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


class Query(NamedTuple):
    """Nodes' queries, and the norm that they still take where `squares` is not None.

    | name | shape, dtype |
    |---|---|
    | `rows` | [N, K] float32 |
    | `squares` | [J, N] float32 or None: partial sums of squares of the rows |
    | `norm_weight`, `norm_bias` | [K] float |
    | `eps` | float |
    """

    rows: Any
    squares: Any
    norm_weight: Any
    norm_bias: Any
    eps: Any


class InputTables(NamedTuple):
    """What input rows are made of.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `token_rows` | [V, E] float | |
    | `positions` | [D + 1, E] float or None | added to them, by depth + 1 |
    | `scale` | [E] float | weight of the norm that follows |
    """

    token_rows: Any
    positions: Any
    scale: Any


class Entries(NamedTuple):
    """Nodes that a round expands, by entry n.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `node` | [N] int32 | row of the tree; below 0: none, and the entry is inert |
    | `depth` | [N] int32 | |
    | `score` | [N] float32 | |
    """

    node: Any
    depth: Any
    score: Any


class StepInputs(NamedTuple):
    """What the node step reads of each entry.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `position` | [N] int32 | depth + 1 |
    | `columns` | [N] int32 | columns that it attends to; 0: none |
    | `slot` | [N] int32 | row of the cache for its keys and values; -1: none |
    | `path` | [N, D] int32 | rows of the cache of its ancestors and itself, by depth |
    | `row_paths` | [R, T, D] int32 | the same of every row of the trees |
    | `x` | [N, E] float32 or None | input row, where the residual stream begins with it |
    | `scaled` | [N, E] float | the input row times the weight of the norm that follows |
    | `squares` | [N] float32 | its sum of squares |
    """

    position: Any
    columns: Any
    slot: Any
    path: Any
    row_paths: Any
    x: Any
    scaled: Any
    squares: Any


class Growth(NamedTuple):
    """What every kernel that places nodes is given; it leaves the next round's entries and inputs.

    | name | shape, dtype | meaning |
    |---|---|---|
    | `trees`, `frontiers` | `TreeRows`, `Frontier` | |
    | `row_scores` | [R, T] float32 | scores of the trees' rows |
    | `tables`, `entries`, `inputs` | `InputTables`, `Entries`, `StepInputs` | |
    | `stride` | int | rows of the cache that a request has |
    """

    trees: Any
    frontiers: Any
    row_scores: Any
    tables: Any
    entries: Any
    inputs: Any
    stride: Any
