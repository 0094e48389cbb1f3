# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the weave's kernels, in one place: what was measured, and rules for the rest.

`python -m benchmarks.ops.weave --tune` times others and prints rows for the tables below. Knows no
kernel: the shapes are those of `adapter.triton.linear_kernel` and
`weave.triton.score_and_grow_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

PROGRAMS = 128
"""Programs that fill the device, if each reads its share of the weights."""
FEW_ROWS = 4
"""Rows up to which products are taken without tensor cores, which want 8 of them or more."""
_MOST_PER_THREAD = 128
"""Weights that a thread holds at once without tensor cores: two to a register."""


class Tiling(NamedTuple):
    """Launch shape of `linear_kernel`: outputs, rows and inputs of a tile, and the split of K.

    Without `dots` a tile's products are plain multiplications: the weights go from memory straight
    into registers, all of them on their way at once.
    """

    block_o: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    dots: bool = True


class ScoreTiling(NamedTuple):
    """Launch shape of `score_and_grow_kernel`: candidates of a program, inputs read at a time."""

    candidates: int
    block_k: int
    num_warps: int


# (inputs, outputs, rows) in bfloat16; rows are the power of two from the real number up, at least 4
# and at most 256. Measured on an H200 with weights from memory (docs/kernels.md, "The weave"): in
# whole builds these were faster than the best with weights in the L2 cache.
LayerShape = tuple[int, int, int]
LINEAR: dict[LayerShape, Tiling] = {
    # One request of four nodes: the published adapter.
    (2048, 6144, 4): Tiling(16, 8, 512, 1, 2, 4),
    (2048, 2048, 4): Tiling(4, 4, 2048, 1, 2, 1, False),
    (5120, 2048, 4): Tiling(16, 8, 512, 1, 2, 4),
    (2048, 5120, 4): Tiling(8, 4, 2048, 1, 4, 1, False),
    # Its prefix: 16 rows a request.
    (5120, 2048, 16): Tiling(32, 16, 256, 4, 4, 4),
    (2048, 4096, 16): Tiling(16, 16, 512, 1, 2, 3),
    # 16 requests of four nodes.
    (2048, 6144, 64): Tiling(64, 64, 128, 1, 4, 5),
    (2048, 2048, 64): Tiling(64, 64, 128, 4, 4, 4),
    (5120, 2048, 64): Tiling(64, 64, 128, 4, 4, 4),
    (2048, 5120, 64): Tiling(64, 64, 128, 1, 4, 5),
    # Their prefix.
    (5120, 2048, 256): Tiling(64, 64, 128, 1, 4, 5),
    (2048, 4096, 256): Tiling(64, 64, 64, 1, 4, 6),
}
# (inputs, nodes) of a round, nodes as rows above. None: of nine shapes the rule's were the fastest
# with 4 nodes and with 64.
SCORES: dict[tuple[int, int], ScoreTiling] = {}


def rows_class(rows: int) -> int:
    """The rows of a table's key."""
    return min(256, max(FEW_ROWS, _power_of_two(rows)))


def choose_tiling(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    gated: bool = False,
    measured: Mapping[LayerShape, Tiling] | None = None,
) -> Tiling:
    """Launch shape for `rows` rows: the table's, `measured` before it, or by rule.

    Gated layers have two weights for each output. The rule is programs enough to fill the device,
    tiles no smaller. Few rows get narrow tiles of outputs, since only the weights are worth reading
    well. Many rows get tall ones, since each program reads all of its rows' inputs, and so a split
    sum instead.
    """
    if dtype == torch.bfloat16:
        shape = (inputs, outputs, rows_class(rows))
        for table in (measured or {}, LINEAR):
            if shape in table:
                return _for_gates(table[shape]) if gated else table[shape]
    if rows <= FEW_ROWS:
        tiling = _without_dots(rows, inputs)
        return _for_gates(tiling) if gated else tiling
    block_n = min(64, max(16, _power_of_two(rows)))
    block_o = 16 if block_n == 16 and outputs <= 4096 else 32 if block_n <= 32 else 64
    block_k = 64 if dtype.itemsize == 4 else 128
    if block_n == 16 and dtype.itemsize < 4:
        block_k = 256
    block_k = min(block_k, max(16, _power_of_two(inputs)))
    programs = -(-outputs // block_o) * -(-rows // block_n)
    splits = 1
    # Narrow tiles have few bytes on their way.
    wanted = PROGRAMS * (4 if block_n <= 32 else 2)
    while programs * splits * 3 <= wanted and inputs >= 2 * block_k * splits * 2:
        splits *= 2
    stages = 3 if block_k * (block_o + block_n) * dtype.itemsize > 24576 else 4
    return Tiling(block_o, block_n, block_k, splits, 4, stages)


def _for_gates(tiling: Tiling) -> Tiling:
    """A tile that holds twice the weights of each output, where registers are the limit."""
    return tiling if tiling.dots else tiling._replace(block_o=max(1, tiling.block_o // 2))


def _without_dots(rows: int, inputs: int) -> Tiling:
    """Whole rows of weights, eight at most, in registers."""
    block_k = min(8192, max(16, _power_of_two(inputs)))
    warps = 8 if block_k > 4096 else 4
    block_o = max(1, min(8, warps * 32 * _MOST_PER_THREAD // block_k))
    return Tiling(block_o, _power_of_two(rows), block_k, 1, warps, 1, False)


def linear_scratch(tiling: Tiling, rows: int, outputs: int, gated: bool) -> tuple[int, int]:
    """Elements of `part` and of `ticket` that a launch needs; none without a split."""
    if tiling.splits == 1:
        return 0, 0
    tiles = -(-outputs // tiling.block_o) * -(-rows // tiling.block_n)
    size = tiling.block_o * tiling.block_n * tiling.splits * (2 if gated else 1)
    return tiles * size, tiles


def choose_scores(
    inputs: int,
    requests: int,
    width: int,
    pool: int,
    measured: Mapping[tuple[int, int], ScoreTiling] | None = None,
) -> ScoreTiling:
    """Launch shape for `requests` x `width` nodes with pools of `pool`: the table's, or by rule."""
    shape = (inputs, rows_class(requests * width))
    for table in (measured or {}, SCORES):
        if shape in table and table[shape].num_warps >= growth_warps(width, pool):
            return table[shape]
    # As many columns at a time as registers hold of a loop unrolled.
    columns = min(1024 if inputs <= 2048 else 512, _power_of_two(inputs))
    return ScoreTiling(8, columns, growth_warps(width, pool))


def growth_warps(width: int, pool: int) -> int:
    """Warps that hold the candidates of `width` nodes without spilling registers."""
    candidates = _power_of_two(width) * _power_of_two(pool)
    return 4 if candidates <= 2048 else 8 if candidates <= 4096 else 16


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
