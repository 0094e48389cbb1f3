# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""All rounds of a weave in one launch, for few rows, one layer and projected tables.

Every program stays on its multiprocessor and works through the layers of every round: qkv,
attention, output, both layers of the MLP, scores and growth. Between two of them all programs meet
at a barrier instead of a launch, and while they wait for each other the weights that each will need
next are on their way already, as are the rows of the candidates from the start of the round. The
arithmetic is that of the kernels of `adapter.triton` and `weave.triton`, tile by tile.

A barrier counts arrivals in one word that only rises. An arrival releases what the program stored;
the reading that ends a wait acquires what all others did. Since waiting programs hold their place,
all must run at once: the launch is a cooperative one, which fails where they do not fit. Whoever
has polled `polls` times in all gives up waiting; such a launch leaves trees of roots alone and is
counted.

Shape legend as in `weave.triton`; KB and MB are the inputs of a layer, up to a power of two.
"""

import triton
import triton.language as tl

from vllm_weaver.adapter.triton import (
    attend,
    finish_linear,
    multiply_rows,
    norm_scale,
    prefetch,
)
from vllm_weaver.tree.triton import place_root
from vllm_weaver.weave.triton import grow, score_candidates

ARRIVED, DONE, FAILED, STALLED = range(4)
"""Words of `barrier`: arrivals, programs at the end, a wait given up, launches with such ones."""
POLLS = 1 << 21
"""A second or more; a launch needs some thousands."""


@triton.jit
def _arrive(arrived_ptr):
    """Publish what this program stored."""
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _wait(arrived_ptr, target, polls):
    """Wait for `target` arrivals as long as there are polls; returns those that are left."""
    seen = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
    while (seen < target) & (polls > 0):
        seen = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        polls -= 1
    tl.debug_barrier()
    return polls


@triton.jit
def _tile_weights(
    weight_ptr, tile, K: tl.constexpr, KB: tl.constexpr, M: tl.constexpr, BO: tl.constexpr
):
    """Weights [BO, 1, KB] of a tile of outputs; zeros past the last one."""
    o = (tile * BO + tl.arange(0, BO))[:, None, None]
    k = tl.arange(0, KB)[None, None, :]
    return tl.load(weight_ptr + o * K + k, mask=(o < M) & (k < K), other=0.0)


@triton.jit
def _prefetch_tile(
    weight_ptr, tile, K: tl.constexpr, M: tl.constexpr, BO: tl.constexpr, LINES: tl.constexpr
):
    """Ask for a tile's weights in the L2 cache."""
    ROW: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    o = tl.minimum(tile * BO + tl.arange(0, BO), M - 1)
    line = tl.minimum(tl.arange(0, LINES) * ROW, K - 1)
    prefetch(weight_ptr + o[:, None] * K + line[None, :])


@triton.jit
def _layer(
    w,
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    add_ptr,
    out_ptr,
    next_ptr,
    next_weight_ptr,
    kv_ptr,
    slot_ptr,
    out_squares_ptr,
    N,
    eps,
    K: tl.constexpr,
    KB: tl.constexpr,
    M: tl.constexpr,
    OUT: tl.constexpr,
    J: tl.constexpr,
    JB: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    CACHE: tl.constexpr,
    SQUARES: tl.constexpr,
    NEXT: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
):
    """This program's tiles of a layer as in `linear_kernel`; `w` are the weights of the first."""
    n = tl.arange(0, BN)
    k = tl.arange(0, KB)
    scale = tl.zeros((BN,), tl.float32)
    if J > 0:
        scale = norm_scale(squares_ptr, n, n < N, N, eps, J, JB, K)
    for tile in range(tl.program_id(0), (M + BO - 1) // BO, tl.num_programs(0)):
        later = _tile_weights(weight_ptr, tile + tl.num_programs(0), K, KB, M, BO)
        acc = multiply_rows(tl.zeros((BO, BN), tl.float32), w, x_ptr, k, 0, N, K, BN)
        o = tile * BO + tl.arange(0, BO)
        finish_linear(
            *(acc, acc, scale, o, n, bias_ptr, add_ptr, slot_ptr, out_ptr, next_ptr),
            *(next_weight_ptr, kv_ptr, slot_ptr, out_squares_ptr, tile, N, M, OUT, BIAS),
            *(ACTIVATION, ADD, CACHE, SQUARES, NEXT, J > 0),
        )
        w = later


@triton.jit(do_not_specialize=["polls"])
def rounds_kernel(
    qkv_ptr,
    qkv_bias_ptr,
    qkv_eps,
    output_ptr,
    mlp_norm_ptr,
    mlp_eps,
    first_ptr,
    first_bias_ptr,
    second_ptr,
    second_bias_ptr,
    q_ptr,
    kv_ptr,
    attended_ptr,
    between_ptr,
    between_scaled_ptr,
    between_squares_ptr,
    hidden_ptr,
    query_ptr,
    query_squares_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    pool_rows_ptr,
    ids_ptr,
    logits_ptr,
    scores_ptr,
    ticket_ptr,
    barrier_ptr,
    keys_ptr,
    frontier_tokens_ptr,
    frontier_parents_ptr,
    token_rows_ptr,
    positions_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    node_ptr,
    depth_ptr,
    score_ptr,
    position_ptr,
    count_ptr,
    slot_ptr,
    path_ptr,
    row_paths_ptr,
    x_ptr,
    scaled_ptr,
    scale_ptr,
    squares_ptr,
    noise_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    ids_stride_r,
    ids_stride_d,
    logits_stride_r,
    logits_stride_d,
    noise_stride_r,
    noise_stride_d,
    stride,
    attention_scale,
    eps,
    weight,
    penalty,
    polls,
    R: tl.constexpr,
    J: tl.constexpr,
    JB: tl.constexpr,
    ROUNDS: tl.constexpr,
    H: tl.constexpr,
    HD: tl.constexpr,
    HB: tl.constexpr,
    LB: tl.constexpr,
    MLP: tl.constexpr,
    MB: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    PREFETCH: tl.constexpr,
    NOISE: tl.constexpr,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    PB: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    CB: tl.constexpr,
    F: tl.constexpr,
    FB: tl.constexpr,
    T: tl.constexpr,
    TB: tl.constexpr,
    W: tl.constexpr,
    WB: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    E: tl.constexpr,
    EB: tl.constexpr,
    KB: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Grid: as many programs as run at once. After `start_kernel` and the prefix pass."""
    BLOCKS: tl.constexpr = (P + BP - 1) // BP
    LINE: tl.constexpr = 1024 // pool_rows_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (KB + LINE - 1) // LINE
    program, programs = tl.program_id(0), tl.num_programs(0)
    N = R * G
    arrived_ptr = barrier_ptr
    zero = program * 0
    target = zero
    for step in range(ROUNDS):
        w = _tile_weights(qkv_ptr, program, E, KB, 3 * E, BO)
        polls = _wait(arrived_ptr, target, polls)
        _layer(
            *(w, scaled_ptr, qkv_ptr, qkv_bias_ptr, squares_ptr, x_ptr, q_ptr, x_ptr, x_ptr),
            *(kv_ptr, slot_ptr, x_ptr, N, qkv_eps, E, KB, 3 * E, E, 1, 1),
            *(True, 0, 0, True, False, False, BO, BN),
        )
        _arrive(arrived_ptr)
        target += programs

        if PREFETCH:
            for item in range(program, N * BLOCKS, programs):
                n = zero + item // BLOCKS
                if tl.load(node_ptr + n) >= 0:
                    p = (item % BLOCKS) * BP + tl.arange(0, BP)
                    at = (n // G).to(tl.int64) * ids_stride_r
                    at += tl.load(depth_ptr + n).to(tl.int64) * ids_stride_d
                    ids = tl.load(ids_ptr + at + p, mask=p < P, other=0).to(tl.int64)
                    line = tl.minimum(tl.arange(0, LINES) * LINE, E - 1)
                    prefetch(pool_rows_ptr + tl.maximum(ids, 0)[:, None] * E + line[None, :])
        polls = _wait(arrived_ptr, target, polls)
        for item in range(program, N * H, programs):
            attend(
                *(zero + item // H, item % H, q_ptr, kv_ptr, path_ptr, count_ptr, count_ptr),
                *(attended_ptr, attention_scale, stride, G, D, H, HD, LB, HB, False, False),
            )
        _arrive(arrived_ptr)
        target += programs

        w = _tile_weights(output_ptr, program, E, KB, E, BO)
        polls = _wait(arrived_ptr, target, polls)
        _layer(
            *(w, attended_ptr, output_ptr, x_ptr, x_ptr, x_ptr, between_ptr, between_scaled_ptr),
            *(mlp_norm_ptr, kv_ptr, slot_ptr, between_squares_ptr, N, eps, E, KB, E, E, 0, 1),
            *(False, 0, 1, False, True, True, BO, BN),
        )
        _arrive(arrived_ptr)
        target += programs

        w = _tile_weights(first_ptr, program, E, KB, MLP, BO)
        polls = _wait(arrived_ptr, target, polls)
        _layer(
            *(w, between_scaled_ptr, first_ptr, first_bias_ptr, between_squares_ptr, x_ptr),
            *(hidden_ptr, x_ptr, x_ptr, kv_ptr, slot_ptr, x_ptr, N, mlp_eps, E, KB, MLP, MLP),
            *(J, JB, True, ACTIVATION, 0, False, False, False, BO, BN),
        )
        _arrive(arrived_ptr)
        target += programs

        w = _tile_weights(second_ptr, program, MLP, MB, E, BO)
        polls = _wait(arrived_ptr, target, polls)
        _layer(
            *(w, hidden_ptr, second_ptr, second_bias_ptr, x_ptr, between_ptr, query_ptr, x_ptr),
            *(x_ptr, kv_ptr, slot_ptr, query_squares_ptr, N, eps, MLP, MB, E, E, 0, 1),
            *(True, 0, 1, False, True, False, BO, BN),
        )
        _arrive(arrived_ptr)
        target += programs

        if PREFETCH:
            for tile in range(program, (3 * E + BO - 1) // BO, programs):
                _prefetch_tile(qkv_ptr, tile, E, 3 * E, BO, LINES)
        polls = _wait(arrived_ptr, target, polls)
        for item in range(program, N * BLOCKS, programs):
            n = zero + item // BLOCKS
            r = n // G
            score_candidates(
                *(n, r, item % BLOCKS, query_ptr, norm_weight_ptr, norm_bias_ptr),
                *(query_squares_ptr, pool_rows_ptr, ids_ptr, logits_ptr, scores_ptr, node_ptr),
                *(depth_ptr, ids_stride_r, ids_stride_d, logits_stride_r, logits_stride_d, N),
                *(eps, P, BP, E, BK, J, JB, ""),
            )
            tl.debug_barrier()
            if tl.atomic_add(ticket_ptr + r, 1) == BLOCKS * G - 1:
                tl.store(ticket_ptr + r, 0)
                g = tl.arange(0, GB)
                grow(
                    r,
                    tl.load(node_ptr + r * G + g, mask=g < G, other=-1),
                    tl.load(depth_ptr + r * G + g, mask=g < G, other=0),
                    tl.load(score_ptr + r * G + g, mask=g < G, other=0.0),
                    *(ids_ptr, scores_ptr, keys_ptr, frontier_tokens_ptr, frontier_parents_ptr),
                    *(token_rows_ptr, positions_ptr, tokens_ptr, parents_ptr, depths_ptr),
                    *(num_nodes_ptr, ancestors_ptr, node_ptr, depth_ptr, score_ptr, position_ptr),
                    *(count_ptr, slot_ptr, path_ptr, row_paths_ptr, x_ptr, scaled_ptr, scale_ptr),
                    *(squares_ptr, noise_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr),
                    *(ids_stride_r, ids_stride_d, noise_stride_r, noise_stride_d, stride),
                    *(step * G * C, weight, penalty, NOISE, HALVINGS, P, PB, C, CB, F, FB, T),
                    *(W, WB, D, DB, G, GB, E, EB, True, POSITIONS),
                )
        _arrive(arrived_ptr)
        target += programs

    if polls <= 0:
        tl.store(barrier_ptr + 2, 1)
    tl.debug_barrier()
    # The words are 0 again for the next launch, but the count of launches that stalled.
    if tl.atomic_add(barrier_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        failed = tl.load(barrier_ptr + 2, volatile=True)
        tl.store(barrier_ptr, 0)
        tl.store(barrier_ptr + 1, 0)
        tl.store(barrier_ptr + 2, 0)
        if failed != 0:
            tl.atomic_add(barrier_ptr + 3, 1)
            for r in range(R):
                token = tl.load(tokens_ptr + r * T, volatile=True)
                token = tl.where(tl.load(num_nodes_ptr + r, volatile=True) > 0, token, -1)
                place_root(
                    *(token, tokens_ptr + r * T, parents_ptr + r * T, depths_ptr + r * T),
                    *(num_nodes_ptr + r, ancestors_ptr + r * T * W, T, TB, W, WB),
                )
