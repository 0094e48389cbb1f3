# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Rows of grown trees by falling score, as `best_first.Growth.finished_tree` has them; or the best
of rows and candidates together, as those of `spine_tree`.

Shape legend: R requests; T rows of a tree that has grown, TB the power of two above; F candidates
beside them, 0 without; W words of ancestor bits; U rows of the trees that come out, UW their words.
"""

import triton
import triton.language as tl

from vllm_weaver.tree.triton import Frontier, TreeRows


@triton.jit
def _scores(t, scores_ptr, keys_ptr, count, T: tl.constexpr, F: tl.constexpr):
    """Scores of rows `t`, then of candidates: the root's is 0, rows past `count` have none.

    A candidate's is the magnitude in the upper half of its key or of the key's complement.
    """
    score = tl.load(scores_ptr + t, mask=(t > 0) & (t < count), other=float("-inf"))
    if F > 0:
        inside = (t >= T) & (t < T + F)
        key = tl.load(keys_ptr + t - T, mask=inside, other=0)
        magnitude = (tl.where(key < 0, -1 - key, key) >> 32).to(tl.int32)
        score = tl.where(inside, -magnitude.to(tl.float32, bitcast=True), score)
    return tl.where(t == 0, 0.0, score)


@triton.jit
def _ranks(
    t,
    scores_ptr,
    keys_ptr,
    count,
    T: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Places of rows and candidates `t` [N] when all fall in score, equal ones as given."""
    own = _scores(t, scores_ptr, keys_ptr, count, T, F)[:, None]
    rank = tl.zeros_like(t)
    for start in range(0, T + F, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = _scores(j, scores_ptr, keys_ptr, count, T, F)[None, :]
        before = (other > own) | ((other == own) & (j[None, :] < t[:, None]))
        rank += tl.sum((before & (j < T + F)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def rank_rows_kernel(
    scores_ptr,
    frontier,
    tree,
    out,
    places,
    T: tl.constexpr,
    TB: tl.constexpr,
    W: tl.constexpr,
    F: tl.constexpr,
    U: tl.constexpr,
    UW: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (blocks of ROWS of T + F, R): trees with their rows in order.

    | name | shape, dtype | in/out | meaning |
    |---|---|---|---|
    | scores | [R, T] float32 | in | at most 0, no child above its parent; only rows 1 to
      `num_nodes` - 1 are read, with F > 0 all where there is a node |
    | frontier | `Frontier` of [R, places] or None | in | candidates beside the rows, with F > 0 |
    | tree | `TreeRows` | in | without F, rows past `num_nodes` cleared |
    | out | `TreeRows` | out | other memory than the trees given; with F > 0 the best LIMIT rows and
      candidates, as far as they have a score |
    """
    r = tl.program_id(1)
    scores_ptr += r * T
    keys_ptr = scores_ptr
    if F > 0:
        keys_ptr = frontier.keys + r * places
    nodes = tl.load(tree.num_nodes + r)
    # With candidates every row may be a node, or none.
    count = nodes
    if F > 0:
        count = T * nodes
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, TB)
    is_row = t < T
    rank = _ranks(t, scores_ptr, keys_ptr, count, T, F, WIDE)
    ranks = _ranks(j, scores_ptr, keys_ptr, count, T, F, WIDE)
    parent = tl.load(tree.parents + r * T + t, mask=is_row, other=-1)
    token = tl.load(tree.tokens + r * T + t, mask=is_row, other=0)
    depth = tl.load(tree.depths + r * T + t, mask=is_row, other=0)
    # The row whose bits are those of the ancestors.
    source = t
    keep = t < T + F
    if F > 0:
        own = _scores(t, scores_ptr, keys_ptr, count, T, F)
        keep = keep & (own > float("-inf")) & (rank < LIMIT * nodes)
        at = r * places + t - T
        candidate = keep & (t >= T)
        parent = tl.where(keep, parent, -1)
        token = tl.where(keep, token, 0)
        depth = tl.where(keep, depth, 0)
        parent = tl.load(frontier.parents + at, mask=candidate, other=parent)
        token = tl.load(frontier.tokens + at, mask=candidate, other=token)
        source = tl.where(candidate, parent, t)
        above = tl.load(tree.depths + r * T + parent, mask=candidate, other=0)
        depth = tl.where(candidate, above + 1, depth)
    above = tl.sum(tl.where(parent[:, None] == j[None, :], ranks[None, :], 0), 1)
    at = r * U + rank
    mask = (t < T + F) & (rank < U)
    tl.store(out.tokens + at, token, mask=mask)
    tl.store(out.depths + at, depth, mask=mask)
    tl.store(out.parents + at, tl.where(parent < 0, -1, above), mask=mask)
    for to in tl.static_range(UW):
        word = tl.zeros((ROWS,), tl.int64)
        for start in range(0, TB, BLOCK):
            b = start + tl.arange(0, BLOCK)
            new = _ranks(b, scores_ptr, keys_ptr, count, T, F, WIDE)
            words = tree.ancestors + (r * T + source)[:, None] * W + (b // 64)[None, :]
            bits = tl.load(words, mask=keep[:, None] & (b < T)[None, :], other=0)
            bits = (bits >> (b % 64).to(tl.int64)[None, :]) & 1
            bits = tl.where((new // 64 == to)[None, :], bits, 0)
            # Every bit is set once, so that their sum is their union.
            word += tl.sum(bits << (new % 64).to(tl.int64)[None, :], 1)
        if F > 0:
            own = tl.full((ROWS,), 1, tl.int64) << (rank % 64).to(tl.int64)
            word = tl.where(keep & (rank // 64 == to), word | own, word)
        tl.store(out.ancestors + at * UW + to, word, mask=mask)
    if tl.program_id(0) == 0:
        if F > 0:
            found = tl.zeros((WIDE,), tl.int32)
            for start in range(0, T + F, WIDE):
                every = start + tl.arange(0, WIDE)
                some = _scores(every, scores_ptr, keys_ptr, count, T, F) > float("-inf")
                found += (some & (every < T + F)).to(tl.int32)
            nodes *= tl.minimum(tl.sum(found, 0), LIMIT)
        tl.store(out.num_nodes + r, nodes)


def rank_rows(
    scores_RT,
    tree: TreeRows,
    out: TreeRows,
    requests: int,
    frontier: Frontier | None = None,
    used: int = 0,
    limit: int = 0,
) -> None:
    """Launch `rank_rows_kernel` for the first `requests`.

    With the first `used` places of a `frontier`, the best `limit` of rows and candidates.
    """
    rows, words = tree.ancestors.shape[1:]
    block = triton.next_power_of_2(rows)
    rank_rows_kernel[(triton.cdiv(rows + used, 16), requests)](
        *(scores_RT, frontier, tree, out, 0 if frontier is None else frontier.keys.shape[1]),
        T=rows,
        TB=block,
        W=words,
        F=used,
        U=out.tokens.shape[1],
        UW=out.ancestors.shape[2],
        LIMIT=limit,
        ROWS=16,
        BLOCK=min(16, block),
        WIDE=64 if used else min(16, block),
        num_warps=4,
    )
