# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The adapter's arithmetic in Triton: linear layers for a few rows, and attention of tree nodes.

A linear layer here meets 4 to 64 rows, so its time is the reading of its weights. Whatever stands
between two layers is therefore put into them: the norm, bias, activation, residual or position, and
the cache of keys and values. Where the columns alone do not fill the device, the sum over the
inputs is split; the program that comes last adds the parts up in their order, so that the result
does not depend on which one it was. Rows of the residual stream are float32; products are taken in
the weights' dtype and added up in float32.

The norm of a row x with weight g and bias b before a product with W is

    W (x / rms(x) * g + b) = (W (x * g)) / rms(x) + W b

so whoever writes x also writes x * g in the weights' dtype, with the sums of squares of its columns
as one partial sum per block of them; W b is part of the bias (`folded_bias`); and the inner loop
takes rows as they are.

RoPE is applied where keys are read: a key's position follows from its column, so that the cache
holds keys as they are.

The module does not know which rows are nodes of what, nor vLLM. The definitions are those of
`layers`.

Shape suffixes beyond the package's legend: K inputs and M outputs of a linear layer; S rows of the
cache; J blocks of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.adapter.tiling import Tiling

GELU, GELU_TANH, SWIGLU = 1, 2, 3
ACTIVATIONS = {"gelu": GELU, "gelu_tanh": GELU_TANH, "swiglu": SWIGLU}
ADD_ROWS, ADD_INDEXED = 1, 2
CACHE_LINE = 128


@triton.jit
def wait_for_previous():
    """Wait until the launch before this one is done.

    Every kernel of a chain of overlapping launches calls this before it touches what another one
    writes or reads.
    """
    tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """Let the next launch start, and wait, once every program has come here or ended.

    It stands where a program has asked for all that it reads, so that the next launch's programs
    take neither room nor bandwidth from those that still work.
    """
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _prefetch(pointers):
    """Ask for the lines at `pointers` in the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def norm_scale(squares_ptr, n, present, N, eps, J: tl.constexpr, JB: tl.constexpr, K: tl.constexpr):
    """1 / root mean square of rows `n`, from J partial sums of squares [J, N]."""
    j = tl.arange(0, JB)
    mask = (j < J)[:, None] & present[None, :]
    squares = tl.load(squares_ptr + j[:, None] * N + n[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _accumulate(acc, w, x, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(w.to(tl.float32), x.to(w.dtype).to(tl.float32), acc, input_precision="ieee")
    return tl.dot(w, x.to(w.dtype), acc, input_precision="ieee")


@triton.jit
def _sum_parts(part, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    acc = tl.load(part, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(part + split * SIZE, cache_modifier=".cg")
    return acc


@triton.jit
def _finish_linear(
    acc,
    gate,
    scale,
    o,
    n,
    bias_ptr,
    add_ptr,
    add_index_ptr,
    out_ptr,
    next_ptr,
    next_weight_ptr,
    kv_ptr,
    slot_ptr,
    out_squares_ptr,
    block,
    N,
    M: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    CACHE: tl.constexpr,
    SQUARES: tl.constexpr,
    NEXT: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Norm, bias, activation, addition and stores of a tile [BO, BN]; SWIGLU reads `gate`."""
    y = acc
    if NORMED:
        y *= scale[None, :]
    if ACTIVATION == 3:
        if NORMED:
            gate *= scale[None, :]
        if BIAS:
            gate += tl.load(bias_ptr + o, mask=o < M, other=0.0).to(tl.float32)[:, None]
            y += tl.load(bias_ptr + M + o, mask=o < M, other=0.0).to(tl.float32)[:, None]
        y = gate / (1.0 + tl.exp(-gate)) * y
    elif BIAS:
        y += tl.load(bias_ptr + o, mask=o < M, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION == 1:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == 2:
        u = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))
    mask = (o < M)[:, None] & (n < N)[None, :]
    if ADD > 0:
        row = n
        if ADD == 2:
            row = tl.load(add_index_ptr + n, mask=n < N, other=0)
        y += tl.load(add_ptr + row[None, :] * M + o[:, None], mask=mask, other=0.0).to(tl.float32)
    if SQUARES:
        squares = tl.sum(tl.where(mask, y * y, 0.0), 0)
        tl.store(out_squares_ptr + block * N + n, squares, mask=n < N)
    if NEXT:
        weight = tl.load(next_weight_ptr + o, mask=o < M, other=0.0).to(tl.float32)
        at = next_ptr + n[None, :] * M + o[:, None]
        tl.store(at, (y * weight[:, None]).to(next_ptr.dtype.element_ty), mask=mask)
    if CACHE:
        # Outputs past the queries are a cache row, keys and then values.
        slot = tl.load(slot_ptr + n, mask=n < N, other=-1).to(tl.int64)
        row = kv_ptr + slot[None, :] * (M - OUT) + (o - OUT)[:, None]
        cached = mask & (o >= OUT)[:, None] & (slot >= 0)[None, :]
        tl.store(row, y.to(kv_ptr.dtype.element_ty), mask=cached)
        mask = mask & (o < OUT)[:, None]
    if OUT > 0:
        tl.store(out_ptr + n[None, :] * OUT + o[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weights(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _multiply_rows(acc, w, x_ptr, k, first_row, N, K: tl.constexpr, BN: tl.constexpr):
    """`acc` [BO, BN] plus the products of weights `w` [BO, 1, BK], at inputs `k`, with BN rows.

    Weights and rows are loaded in the shape of their product, so that no thread has to pass any on.
    """
    n = first_row + tl.arange(0, BN)
    mask = (n < N)[None, :, None] & (k < K)[None, None, :]
    x = tl.load(x_ptr + n[None, :, None] * K + k[None, None, :], mask=mask, other=0.0)
    return acc + tl.sum(w.to(tl.float32) * x.to(tl.float32), 2)


@triton.jit
def _product_of_tile(
    x_ptr,
    weight_ptr,
    o,
    first_row,
    first,
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    PART: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    DOTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Products [BO, BN] of outputs `o` and rows from `first_row` on, over PART inputs from `first`
    on, and those of the gate, which are zeros if there is none.
    """
    n = first_row + tl.arange(0, BN)
    acc = tl.zeros((BO, BN), tl.float32)
    gate = tl.zeros((BO, BN), tl.float32)
    if DOTS:
        for start in range(0, PART, BK):
            k = first + start + tl.arange(0, BK)
            weights = weight_ptr + o[:, None] * K + k[None, :]
            inside = (o < M)[:, None] & (k < K)[None, :]
            w = _load_weights(weights, inside, EVEN)
            x = tl.load(
                x_ptr + n[None, :] * K + k[:, None],
                mask=(n < N)[None, :] & (k < K)[:, None],
                other=0.0,
            )
            if GATED:
                gate = _accumulate(gate, w, x, WIDEN)
                w = _load_weights(weights + M * K, inside, EVEN)
            acc = _accumulate(acc, w, x, WIDEN)
    else:
        for start in tl.static_range(0, PART, BK):
            k = first + start + tl.arange(0, BK)
            weights = weight_ptr + o[:, None, None] * K + k[None, None, :]
            inside = (o < M)[:, None, None] & (k < K)[None, None, :]
            w = _load_weights(weights, inside, EVEN)
            g = w
            if GATED:
                w = _load_weights(weights + M * K, inside, EVEN)
            acc = _multiply_rows(acc, w, x_ptr, k, first_row, N, K, BN)
            if GATED:
                gate = _multiply_rows(gate, g, x_ptr, k, first_row, N, K, BN)
    return acc, gate


@triton.jit
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    add_ptr,
    add_index_ptr,
    out_ptr,
    next_ptr,
    next_weight_ptr,
    kv_ptr,
    slot_ptr,
    out_squares_ptr,
    part_ptr,
    ticket_ptr,
    N,
    eps,
    K: tl.constexpr,
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
    SPLITS: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOTS: tl.constexpr,
    LINES: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (blocks of M, SPLITS, blocks of N): `linear(norm(x))` and what follows it.

    With J > 0, `squares` [J, N] gives the norm of the rows; without, they are taken as they are.
    """
    GATED: tl.constexpr = ACTIVATION == 3
    EVEN: tl.constexpr = K % (BK * SPLITS) == 0 and M % BO == 0
    PART: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS) * BK
    block, split = tl.program_id(0), tl.program_id(1)
    o = block * BO + tl.arange(0, BO)
    first_row = tl.program_id(2) * BN
    n = first_row + tl.arange(0, BN)
    first = split * PART
    if OVERLAP:
        # Weights belong to nobody before: they may come while the launch before still runs.
        ROW: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(first + tl.arange(0, LINES) * ROW, K - 1)
        rows = tl.minimum(o, M - 1)[:, None] * K
        _prefetch(weight_ptr + rows + line[None, :])
        if GATED:
            _prefetch(weight_ptr + M * K + rows + line[None, :])
        wait_for_previous()

    scale = tl.zeros((BN,), tl.float32)
    if J > 0 and SPLITS == 1:
        scale = norm_scale(squares_ptr, n, n < N, N, eps, J, JB, K)
    acc, gate = _product_of_tile(
        *(x_ptr, weight_ptr, o, first_row, first, N, K, M, PART, BO, BN, BK),
        *(GATED, EVEN, DOTS, WIDEN),
    )
    if OVERLAP:
        let_next_start()

    if SPLITS == 1:
        _finish_linear(
            *(acc, gate, scale, o, n, bias_ptr, add_ptr, add_index_ptr, out_ptr, next_ptr),
            *(next_weight_ptr, kv_ptr, slot_ptr, out_squares_ptr, block, N, M, OUT, BIAS),
            *(ACTIVATION, ADD, CACHE, SQUARES, NEXT, J > 0),
        )
    else:
        SIZE: tl.constexpr = BO * BN
        PLANES: tl.constexpr = 2 if GATED else 1
        tile = tl.program_id(2) * tl.num_programs(0) + block
        within = tl.arange(0, BO)[:, None] * BN + tl.arange(0, BN)[None, :]
        part = part_ptr + tile * (SPLITS * PLANES * SIZE) + within
        tl.store(part + split * SIZE, acc)
        if GATED:
            tl.store(part + (SPLITS + split) * SIZE, gate)
        # The barrier puts all threads' stores before the ticket, which publishes them.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + tile, 1) == SPLITS - 1:
            tl.store(ticket_ptr + tile, 0)
            if J > 0:
                scale = norm_scale(squares_ptr, n, n < N, N, eps, J, JB, K)
            acc = _sum_parts(part, SPLITS, SIZE)
            if GATED:
                gate = _sum_parts(part + SPLITS * SIZE, SPLITS, SIZE)
            _finish_linear(
                *(acc, gate, scale, o, n, bias_ptr, add_ptr, add_index_ptr, out_ptr, next_ptr),
                *(next_weight_ptr, kv_ptr, slot_ptr, out_squares_ptr, block, N, M, OUT, BIAS),
                *(ACTIVATION, ADD, CACHE, SQUARES, NEXT, J > 0),
            )


@triton.jit
def _rotated(first, second, rope_ptr, position, half, HALF: tl.constexpr, mask):
    """Halves of rotated heads; `rope` [D + 1, 2, HALF] holds cosines, then sines."""
    at = rope_ptr + position * 2 * HALF + half
    cos = tl.load(at, mask=mask, other=0.0)
    sin = tl.load(at + HALF, mask=mask, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attention_kernel(
    q_ptr,
    kv_ptr,
    path_ptr,
    count_ptr,
    rope_ptr,
    out_ptr,
    scale,
    stride_request,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    HD: tl.constexpr,
    LB: tl.constexpr,
    HB: tl.constexpr,
    ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (N, H): one head of one row over the first `count` columns of its request.

    Columns 0..D are the prefix rows, which open the request's part of the cache; column D + 1 + k
    is the row's ancestor (or itself) at depth k, whose cache row is `path` [N, D].
    """
    if OVERLAP:
        wait_for_previous()
    n, head = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = H * HD
    count = tl.load(count_ptr + n)
    column = tl.arange(0, LB)
    present = column < count
    above = tl.load(path_ptr + n * D + column - (D + 1), mask=present & (column > D), other=0).to(
        tl.int64
    )
    base = (n // GROUP).to(tl.int64) * stride_request
    slot = tl.where(column > D, above, base + column)
    keys = kv_ptr + slot[:, None] * (2 * width) + head * HD
    dim = tl.arange(0, HB)[None, :]
    v = tl.load(keys + width + dim, mask=present[:, None] & (dim < HD), other=0.0)
    if OVERLAP:
        let_next_start()
    if ROPE:
        HALF: tl.constexpr = HD // 2
        half = tl.arange(0, HB // 2)[None, :]
        inside = half < HALF
        q = q_ptr + n * width + head * HD + half
        own = count - 1
        position = tl.maximum(tl.where(own > D, own - D, own), 0)
        q1, q2 = _rotated(
            tl.load(q, mask=inside, other=0.0),
            tl.load(q + HALF, mask=inside, other=0.0),
            *(rope_ptr, position, half, HALF, inside),
        )
        mask = present[:, None] & inside
        k1, k2 = _rotated(
            tl.load(keys + half, mask=mask, other=0.0).to(tl.float32),
            tl.load(keys + half + HALF, mask=mask, other=0.0).to(tl.float32),
            *(rope_ptr, tl.where(column > D, column - D, column)[:, None], half, HALF, mask),
        )
        scores = tl.sum(q1 * k1 + q2 * k2, 1)
    else:
        q = tl.load(q_ptr + n * width + head * HD + dim, mask=dim < HD, other=0.0)
        k = tl.load(keys + dim, mask=present[:, None] & (dim < HD), other=0.0)
        scores = tl.sum(q * k.to(tl.float32), 1)
    scores = tl.where(present, scores * scale, float("-inf"))
    top = tl.max(scores, 0)
    weights = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    out = tl.sum(weights[:, None] * v.to(tl.float32), 0) / tl.where(total > 0.0, total, 1.0)
    dim = tl.arange(0, HB)
    tl.store(out_ptr + n * width + head * HD + dim, out, mask=dim < HD)


@triton.jit
def pool_log_softmax(logits):
    """Log-softmax of pools [G, S, L]; -inf stays -inf, a pool of -inf is all -inf, NaN takes its
    pool.
    """
    top = tl.max(tl.max(logits, 1), 1)
    shifted = logits - tl.where(top == float("-inf"), 0.0, top)[:, None, None]
    total = tl.sum(tl.sum(tl.exp(shifted), 1), 1)
    return shifted - tl.log(tl.where(total == 0.0, 1.0, total))[:, None, None]


INTERPRETED = not isinstance(linear_kernel, triton.runtime.JITFunction)


def folded_bias(linear: torch.nn.Linear, norm_bias: Tensor) -> Tensor:
    """W b plus the layer's bias in float32, [M]: what a norm's bias and its own add to `linear`."""
    bias = linear.weight.float() @ norm_bias.float()
    return bias if linear.bias is None else bias + linear.bias.float()


def launch_linear(
    tiling: Tiling,
    rows: int,
    x_NK: Tensor,
    weight_MK: Tensor,
    out_NM: Tensor | None,
    *,
    part: Tensor,
    ticket: Tensor,
    bias_M: Tensor | None = None,
    squares_JN: tuple[Tensor, int] | None = None,
    eps: float = 0.0,
    activation: int = 0,
    add: Tensor | None = None,
    add_index_N: Tensor | None = None,
    cache: tuple[Tensor, Tensor] | None = None,
    scaled: tuple[Tensor, Tensor] | None = None,
    out_squares: Tensor | None = None,
    overlap: bool = False,
) -> int:
    """Launch `linear_kernel`; returns J, the blocks of `out_squares`.

    | name | shape, dtype | in/out | meaning |
    |---|---|---|---|
    | `x_NK` | [N, K], the weights' dtype | in | rows, contiguous; N = `rows` |
    | `weight_MK` | [M, K], with SWIGLU [2 M, K] | in | contiguous |
    | `out_NM` | [N, M]; with `cache` [N, M - width]; None: no such columns | out | |
    | `bias_M` | as the weights' first axis | in | |
    | `squares_JN` | ([J, N] float32, J) | in | partial sums of squares of the rows to be normed, of
      which `x_NK` is the product with the norm's weight; None: rows that are not normed |
    | `eps` | | in | of the norm |
    | `add` | [N, M], or [*, M] with `add_index_N` [N] int | in | added last |
    | `cache` | ([S, width], [N] int32 slots) | out | takes the last columns; slot -1: none |
    | `scaled` | ([N, M] of any dtype, [M] weight) | out, in | the result times the weight |
    | `out_squares` | [J, N] float32, flat | out | partial sums of squares of the result |
    | `part`, `ticket` | see `linear_scratch`; tickets are 0 before and after | scratch | |
    | `overlap` | | | start while the launch before runs, and wait there |
    """
    inputs = x_NK.shape[1]
    outputs = weight_MK.shape[0] // (2 if activation == SWIGLU else 1)
    blocks = triton.cdiv(outputs, tiling.block_o)
    squares, J = squares_JN if squares_JN is not None else (x_NK, 0)
    kv, slots = cache if cache is not None else (x_NK, x_NK)
    following, following_weight = scaled if scaled is not None else (x_NK, x_NK)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    width = 0 if out_NM is None else outputs - (0 if cache is None else kv.shape[1])
    linear_kernel[(blocks, tiling.splits, triton.cdiv(rows, tiling.block_n))](
        *(x_NK, weight_MK, x_NK if bias_M is None else bias_M, squares),
        *(x_NK if add is None else add, x_NK if add_index_N is None else add_index_N),
        *(x_NK if out_NM is None else out_NM, following, following_weight, kv, slots),
        *(x_NK if out_squares is None else out_squares, part, ticket, rows, eps),
        K=inputs,
        M=outputs,
        OUT=width,
        J=J,
        JB=triton.next_power_of_2(max(1, J)),
        BIAS=bias_M is not None,
        ACTIVATION=activation,
        ADD=0 if add is None else ADD_ROWS if add_index_N is None else ADD_INDEXED,
        CACHE=cache is not None,
        SQUARES=out_squares is not None,
        NEXT=scaled is not None,
        SPLITS=tiling.splits,
        BO=tiling.block_o,
        BN=tiling.block_n,
        BK=tiling.block_k,
        DOTS=tiling.dots,
        LINES=triton.next_power_of_2(
            triton.cdiv(inputs * weight_MK.itemsize, tiling.splits * CACHE_LINE)
        ),
        # The interpreter multiplies the raw bits of bfloat16; float32 holds the same values.
        WIDEN=INTERPRETED and weight_MK.dtype == torch.bfloat16,
        OVERLAP=overlap,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **options,
    )
    return blocks


def launch_attention(
    rows: int,
    q_Nr: Tensor,
    kv_S: Tensor,
    path_ND: Tensor,
    count_N: Tensor,
    rope: Tensor | None,
    out_Nr: Tensor,
    *,
    group: int,
    stride: int,
    heads: int,
    overlap: bool = False,
) -> None:
    """Launch `attention_kernel`.

    | name | shape, dtype | in/out | meaning |
    |---|---|---|---|
    | `q_Nr` | [N, r] float32 | in | queries before RoPE |
    | `kv_S` | [S, 2 r] | in | keys before RoPE, then values; `stride` rows per request |
    | `path_ND` | [N, D] int32 | in | cache rows of ancestors and self by depth |
    | `count_N` | [N] int32 | in | columns seen; 0 gives zeros |
    | `rope` | [D + 1, 2, h / 2] float32 or None | in | cosines and sines by position |
    | `out_Nr` | [N, r] float32 | out | |
    | `group` | | | rows of a request: row n belongs to request n // group |
    """
    width, depth = q_Nr.shape[1], path_ND.shape[1]
    head_dim = width // heads
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    attention_kernel[(rows, heads)](
        *(q_Nr, kv_S, path_ND, count_N, count_N if rope is None else rope, out_Nr),
        head_dim**-0.5,
        stride,
        GROUP=group,
        D=depth,
        H=heads,
        HD=head_dim,
        LB=triton.next_power_of_2(2 * depth + 1),
        HB=triton.next_power_of_2(head_dim),
        ROPE=rope is not None,
        OVERLAP=overlap,
        num_warps=4,
        **options,
    )
