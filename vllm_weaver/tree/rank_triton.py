# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Rows of grown trees by falling score, as `best_first.Growth.finished_tree` has them.

Shape legend: R requests; T rows of a tree, TB the power of two above; W words of ancestor bits.
"""

import triton
import triton.language as tl

from vllm_weaver.tree.triton import TreeRows


@triton.jit
def _scores(t, scores_ptr, count):
    """Scores of rows `t`: the root's is 0, and rows past `count` have none."""
    score = tl.load(scores_ptr + t, mask=(t > 0) & (t < count), other=float("-inf"))
    return tl.where(t == 0, 0.0, score)


@triton.jit
def _ranks(t, scores_ptr, count, T: tl.constexpr, BLOCK: tl.constexpr):
    """Places of rows `t` [N] when a tree's rows fall in score, equal ones in the order given."""
    own = _scores(t, scores_ptr, count)[:, None]
    rank = tl.zeros_like(t)
    for start in range(0, T, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = _scores(j, scores_ptr, count)[None, :]
        before = (other > own) | ((other == own) & (j[None, :] < t[:, None]))
        rank += tl.sum((before & (j < T)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def rank_rows_kernel(
    scores_ptr,
    tree,
    out,
    T: tl.constexpr,
    TB: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of ROWS rows, R): trees with their rows in order.

    | name | shape, dtype | in/out | meaning |
    |---|---|---|---|
    | scores | [R, T] float32 | in | at most 0, no child above its parent; only rows 1 to
      `num_nodes` - 1 are read |
    | tree | `TreeRows` | in | rows past `num_nodes` cleared |
    | out | `TreeRows` | out | other memory than the trees given |
    """
    r = tl.program_id(1)
    scores_ptr += r * T
    count = tl.load(tree.num_nodes + r)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, TB)
    mask = t < T
    rank = _ranks(t, scores_ptr, count, T, BLOCK)
    ranks = _ranks(j, scores_ptr, count, T, BLOCK)
    parent = tl.load(tree.parents + r * T + t, mask=mask, other=-1)
    above = tl.sum(tl.where(parent[:, None] == j[None, :], ranks[None, :], 0), 1)
    at = r * T + rank
    tl.store(out.tokens + at, tl.load(tree.tokens + r * T + t, mask=mask), mask=mask)
    tl.store(out.depths + at, tl.load(tree.depths + r * T + t, mask=mask), mask=mask)
    tl.store(out.parents + at, tl.where(parent < 0, -1, above), mask=mask)
    for to in tl.static_range(W):
        word = tl.zeros((ROWS,), tl.int64)
        for start in range(0, TB, BLOCK):
            b = start + tl.arange(0, BLOCK)
            new = _ranks(b, scores_ptr, count, T, BLOCK)
            words = tree.ancestors + (r * T + t)[:, None] * W + (b // 64)[None, :]
            bits = tl.load(words, mask=mask[:, None] & (b < T)[None, :], other=0)
            bits = (bits >> (b % 64).to(tl.int64)[None, :]) & 1
            bits = tl.where((new // 64 == to)[None, :], bits, 0)
            # Every bit is set once, so that their sum is their union.
            word += tl.sum(bits << (new % 64).to(tl.int64)[None, :], 1)
        tl.store(out.ancestors + at * W + to, word, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(out.num_nodes + r, count)


def rank_rows(scores_RT, tree: TreeRows, out: TreeRows, requests: int) -> None:
    """Launch `rank_rows_kernel` for the first `requests`."""
    rows, words = tree.ancestors.shape[1:]
    block = triton.next_power_of_2(rows)
    rank_rows_kernel[(triton.cdiv(rows, 16), requests)](
        *(scores_RT, tree, out),
        T=rows,
        TB=block,
        W=words,
        ROWS=16,
        BLOCK=min(16, block),
        num_warps=4,
    )
