# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The two kernels that join tree growth to the adapter's arithmetic.

`start_kernel` begins a step: the prefix rows' inputs and the root. `score_and_grow_kernel` ends a
round: candidates' scores, and then, in the last program of each request, growth and the inputs of
the nodes to expand next. In between stand the adapter's own kernels.

Shape legend as in `vllm_weaver.tree.triton` and `vllm_weaver.adapter`; E is the width of a node's
input row (r with projected tables, else e); entry n = r * G + g is the g-th node of request r.
"""

import triton
import triton.language as tl

from vllm_weaver.adapter.triton import (
    let_next_start,
    norm_scale,
    pool_log_softmax,
    wait_for_previous,
)
from vllm_weaver.ops.noise.drawn import drawn
from vllm_weaver.tree.triton import frontier_of, place_best, place_root, push_children, tree_of
from vllm_weaver.weave.arguments import Entries


@triton.jit
def _row_of(array, r, d):
    """Where the row of request r and depth d of a `ByDepth` starts."""
    return array.start + (r * array.stride_r + d * array.stride_d)


@triton.jit
def _prepare_nodes(
    r,
    expands,
    row,
    token,
    depth,
    score,
    parent,
    growth,
    sizes: tl.constexpr,
):
    """Write the entries and inputs of G nodes; those that do not expand are inert."""
    T: tl.constexpr = sizes.T
    D: tl.constexpr = sizes.D
    G: tl.constexpr = sizes.G
    E: tl.constexpr = sizes.E
    EB: tl.constexpr = sizes.EB
    GB: tl.constexpr = triton.next_power_of_2(G)
    tables = growth.tables
    entries = growth.entries
    inputs = growth.inputs
    g = tl.arange(0, GB)
    n = r * G + g
    here = g < G
    slot = (r * growth.stride + D + 1 + row).to(tl.int32)
    tl.store(entries.node + n, tl.where(expands, row, -1), mask=here)
    tl.store(entries.depth + n, tl.where(expands, depth, 0), mask=here)
    tl.store(entries.score + n, score, mask=here)
    tl.store(inputs.position + n, tl.where(expands, depth + 1, 0), mask=here)
    tl.store(inputs.columns + n, tl.where(expands, D + 2 + depth, 0), mask=here)
    tl.store(inputs.slot + n, tl.where(expands, slot, -1), mask=here)

    d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    above = expands[:, None] & (d < depth[:, None])
    old = tl.load(inputs.row_paths + (r * T + parent)[:, None] * D + d, mask=above, other=0)
    path = tl.where(d == depth[:, None], slot[:, None], old)
    mask = expands[:, None] & (d < D)
    tl.store(inputs.row_paths + (r * T + row)[:, None] * D + d, path, mask=mask)
    tl.store(inputs.path + n[:, None] * D + d, path, mask=mask)

    squares = tl.zeros((GB,), tl.float32)
    source = tables.token_rows + token.to(tl.int64)[:, None] * E
    for start in tl.static_range(0, E, EB):
        e = start + tl.arange(0, EB)[None, :]
        inside = expands[:, None] & (e < E)
        x = tl.load(source + e, mask=inside, other=0.0).to(tl.float32)
        if tables.positions is not None:
            at = tables.positions + (depth + 1)[:, None] * E + e
            x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        inside = here[:, None] & (e < E)
        if inputs.x is not None:
            tl.store(inputs.x + n[:, None] * E + e, x, mask=inside)
        weight = tl.load(tables.scale + e, mask=e < E, other=0.0).to(tl.float32)
        scaled = (x * weight).to(inputs.scaled.dtype.element_ty)
        tl.store(inputs.scaled + n[:, None] * E + e, scaled, mask=inside)
        squares += tl.sum(x * x, 1)
    tl.store(inputs.squares + n, squares, mask=here)


@triton.jit
def start_kernel(
    h_ver_ptr,
    h_draft,
    roots_ptr,
    prefix_x_ptr,
    prefix_scale_ptr,
    prefix_squares_ptr,
    h_ver_stride_r,
    growth,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    sizes: tl.constexpr,
):
    """Grid (D + 2, R): the prefix rows of a request times the weight of their norm, with their
    squares; then its root.

    Hidden states of an inert request (root below 0) are not read: its rows are zeros.
    """
    T: tl.constexpr = sizes.T
    W: tl.constexpr = sizes.W
    D: tl.constexpr = sizes.D
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    t = tl.program_id(0)
    r = tl.program_id(1)
    token = tl.load(roots_ptr + r).to(tl.int32)
    live = (token >= 0).to(tl.int32)
    if t <= D:
        row = r * (D + 1) + t
        source = h_ver_ptr + r.to(tl.int64) * h_ver_stride_r
        if t > 0:
            source = _row_of(h_draft, r.to(tl.int64), (t - 1).to(tl.int64))
        k = tl.arange(0, triton.next_power_of_2(WIDTH))
        x = tl.load(source + k, mask=k < WIDTH * live, other=0.0).to(tl.float32)
        scaled = x * tl.load(prefix_scale_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        at = prefix_x_ptr + row.to(tl.int64) * WIDTH + k
        tl.store(at, scaled.to(prefix_x_ptr.dtype.element_ty), mask=k < WIDTH)
        tl.store(prefix_squares_ptr + row, tl.sum(x * x, 0))
    else:
        place_root(token, tree_of(growth.trees, r, T, W), T, W)
        g = tl.arange(0, triton.next_power_of_2(sizes.G))
        none = tl.zeros_like(g)
        _prepare_nodes(
            *(r, g < live, none, none + token, none, none.to(tl.float32), none),
            *(growth, sizes),
        )


@triton.jit
def _score_candidates(
    n,
    r,
    block,
    node,
    depth,
    query,
    pool_rows_ptr,
    ids,
    logits,
    scores_ptr,
    N,
    P: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
):
    """Scores of a block of the candidates of entry n's node: the drafter's logit plus the product
    of the candidate's row [K] with the node's query; with J > 0 the query is normed first.
    """
    if node >= 0:
        p = block * BP + tl.arange(0, BP)
        pool = _row_of(ids, r.to(tl.int64), depth.to(tl.int64))
        token = tl.load(pool + p, mask=p < P, other=-1).to(tl.int64)
        if J > 0:
            one = n + tl.zeros((1,), tl.int32)
            JB: tl.constexpr = triton.next_power_of_2(J)
            scale = norm_scale(query.squares, one, one < N, N, query.eps, J, JB, K)
        rows = pool_rows_ptr + token[:, None] * K
        acc = tl.zeros((BP, BK), tl.float32)
        # Unrolled, so that the rows are all on their way at once.
        for start in tl.static_range(0, K, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(query.rows + n * K + k, mask=k < K, other=0.0)
            if J > 0:
                weight = tl.load(query.norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
                bias = tl.load(query.norm_bias + k, mask=k < K, other=0.0).to(tl.float32)
                x = x * scale * weight + bias
            mask = (token >= 0)[:, None] & (k < K)[None, :]
            w = tl.load(rows + k[None, :], mask=mask, other=0.0)
            acc += w.to(tl.float32) * x[None, :]
        given = _row_of(logits, r.to(tl.int64), depth.to(tl.int64))
        score = tl.load(given + p, mask=p < P, other=0.0).to(tl.float32)
        score = tl.where(token >= 0, score + tl.sum(acc, 1), float("-inf"))
        tl.store(scores_ptr + n * P + p, score, mask=p < P)


@triton.jit
def _candidates(
    r,
    own,
    ids,
    scores_ptr,
    noise,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
):
    """Log-probabilities and ids of the children of request r's entries, [GB, S, L], and [GB]
    pointers at their pools.

    With noise, log-probabilities are those of being drawn by a sampler of that noise
    (`ops.noise.drawn`).
    """
    GB: tl.constexpr = triton.next_power_of_2(G)
    PB: tl.constexpr = triton.next_power_of_2(P)
    n = r * G + tl.arange(0, GB)
    L: tl.constexpr = PB if PB < 128 else 128
    S: tl.constexpr = PB // L
    p = tl.arange(0, S)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    expanded = own.node >= 0
    mask = expanded[:, None, None] & (p < P)
    scores = scores_ptr + n[:, None, None] * P + p
    logits = tl.load(scores, mask=mask, other=float("-inf"), cache_modifier=".cg")
    pools = _row_of(ids, r.to(tl.int64), own.depth.to(tl.int64))
    tokens = tl.load(pools[:, None, None] + p, mask=mask, other=-1)
    log_probs = pool_log_softmax(logits)
    if noise is not None:
        rows = _row_of(noise.noise, r.to(tl.int64), own.depth.to(tl.int64)[:, None])
        p = tl.arange(0, PB)[None, :]
        values = tl.load(rows + p, mask=expanded[:, None] & (p < P), other=0.0)
        log_probs = drawn(
            *(tl.reshape(log_probs, (GB, PB)), values),
            *(tl.load(noise.temperature + r), tl.load(noise.top_k + r)),
            *(tl.load(noise.top_p + r), tl.load(noise.min_p + r), P, weight, penalty, HALVINGS),
        )
        log_probs = tl.reshape(log_probs, (GB, S, L))
    return log_probs, tokens, pools


@triton.jit
def _grow(
    r,
    own,
    log_probs,
    ids,
    pools,
    growth,
    first,
    LIMIT: tl.constexpr,
    sizes: tl.constexpr,
):
    """Growth of request r by its entries `own`, each [GB], and `_candidates`.

    The children go to the frontier from place `first` on; the G best candidates of the whole
    frontier are placed, as far as there are rows below LIMIT, and prepared for the next round.
    """
    G: tl.constexpr = sizes.G
    frontier = frontier_of(growth.frontiers, r, sizes.F)
    tree = tree_of(growth.trees, r, sizes.T, sizes.W)
    push_children(
        *(log_probs, ids, own.node >= 0, own.node, own.score, pools),
        *(frontier, first, G, sizes.C),
    )
    tl.debug_barrier()
    live, row, token, depth, total, parent, placed = place_best(
        frontier, first + G * sizes.C, tree, LIMIT, G, sizes.F, sizes.W
    )
    tl.store(growth.row_scores + r * sizes.T + row, total, mask=live)
    # A full tree has no use for further children.
    leaf_depth = sizes.D * (placed < LIMIT).to(tl.int32)
    _prepare_nodes(r, live & (depth < leaf_depth), row, token, depth, total, parent, growth, sizes)


@triton.jit(do_not_specialize=["first"])
def score_and_grow_kernel(
    query,
    pool_rows_ptr,
    ids,
    logits,
    noise,
    scores_ptr,
    ticket_ptr,
    growth,
    first,
    N,
    weight,
    penalty,
    HALVINGS: tl.constexpr,
    BP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    J: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    sizes: tl.constexpr,
):
    """Grid (blocks of P, N = R * G): `_score_candidates`; `_grow` in a request's last program."""
    P: tl.constexpr = sizes.P
    G: tl.constexpr = sizes.G
    if OVERLAP:
        wait_for_previous()
    n = tl.program_id(1)
    r = n // G
    # For growth, should this be the program that does it: its loads wait for each other enough.
    g = tl.arange(0, triton.next_power_of_2(G))
    entries = growth.entries
    own = Entries(
        tl.load(entries.node + r * G + g, mask=g < G, other=-1),
        tl.load(entries.depth + r * G + g, mask=g < G, other=0),
        tl.load(entries.score + r * G + g, mask=g < G, other=0.0),
    )
    node, depth = tl.load(entries.node + n), tl.load(entries.depth + n)
    _score_candidates(
        *(n, r, tl.program_id(0), node, depth, query, pool_rows_ptr, ids, logits, scores_ptr),
        *(N, P, BP, K, BK, J),
    )
    if OVERLAP:
        let_next_start()
    # The barrier puts all threads' stores before the ticket, which publishes them.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr + r, 1) == tl.num_programs(0) * G - 1:
        tl.store(ticket_ptr + r, 0)
        log_probs, tokens, pools = _candidates(
            r, own, ids, scores_ptr, noise, weight, penalty, HALVINGS, P, G
        )
        _grow(r, own, log_probs, tokens, pools, growth, first, LIMIT, sizes)
