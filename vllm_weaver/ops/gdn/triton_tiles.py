# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, assignment"
"""What the tree verification's kernel does with tiles: products, masks, decays, scales.

The module knows nothing of vLLM.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gates(a, b, A_log, dt_bias):
    """Log decay and write strength, with the operations of vLLM's packed decode kernel."""
    x = a.to(tl.float32) + dt_bias
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    return -tl.exp(A_log) * softplus, tl.sigmoid(b.to(tl.float32))


@triton.jit
def product(a, b, PRECISE: tl.constexpr):
    """A product of factors of order one: float16 unless PRECISE."""
    if PRECISE:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def row_products(a, b, acc, PRECISE: tl.constexpr, WIDEN: tl.constexpr):
    """acc + a b^T of raw rows, whose dtype a dot takes as it is."""
    if WIDEN:
        # The interpreter multiplies the raw bits of bfloat16; float32 holds the same values.
        return tl.dot(a.to(tl.float32), tl.trans(b).to(tl.float32), acc)
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="tf32x3" if PRECISE else None)


@triton.jit
def halves(x, dtype: tl.constexpr):
    """float32 as two numbers of a narrower dtype: the leading bits that it holds, and the rest."""
    bits = x.to(tl.int32, bitcast=True) & (-65536 if dtype == tl.bfloat16 else -8192)
    high = bits.to(tl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def project(
    k, q, s, keys, queries, squares, recalled, o, PRECISE: tl.constexpr, WIDEN: tl.constexpr
):
    """Add the products of some columns: k and q [BT, BK] with each other, and with s [BV, BK]."""
    keys = row_products(k, k, keys, PRECISE, WIDEN)
    queries = row_products(q, k, queries, PRECISE, WIDEN)
    squares += q.to(tl.float32) * q.to(tl.float32)
    if not PRECISE:
        s, s_low = halves(s, k.dtype)
        recalled = row_products(k, s_low, recalled, PRECISE, WIDEN)
        o = row_products(q, s_low, o, PRECISE, WIDEN)
    recalled = row_products(k, s, recalled, PRECISE, WIDEN)
    o = row_products(q, s, o, PRECISE, WIDEN)
    return keys, queries, squares, recalled, o


@triton.jit
def magnitude(x):
    """The power of two at or below max |x|, and its inverse."""
    bits = tl.max(tl.abs(x)).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = 0x7F000000 - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def live_half(ancestors, row, alive, half, nodes, stride_t):
    """32 ancestor bits of each row, from row 32 * `half` on; those of dead rows are cleared."""
    left = tl.minimum(tl.maximum(nodes - 32 * half, 0), 32)
    # Shifted in two steps, since one by 32 is undefined.
    keep = ~((tl.full((), -1, tl.int32) << (left // 2)) << (left - left // 2))
    return tl.load(ancestors + row * stride_t + half, mask=alive, other=0) & keep


@triton.jit
def load_words(ancestors, row, alive, nodes, stride_t, jb: tl.constexpr, BT: tl.constexpr):
    """Ancestor bits of each row in block `jb`: one half, or two where a block takes two."""
    half: tl.constexpr = jb * BT // 32
    low = live_half(ancestors, row, alive, half, nodes, stride_t)
    high = low
    if BT == 64:
        high = live_half(ancestors, row, alive, half + 1, nodes, stride_t)
    return low, high


@triton.jit
def mask_tile(low, high, jb: tl.constexpr, BT: tl.constexpr):
    """[BT, BT]: whether the column's row, of block `jb`, is the row or an ancestor of it."""
    col = tl.arange(0, BT)[None, :]
    word = low[:, None]
    if BT == 64:
        word = tl.where(col < 32, word, high[:, None])
    return (word & (1 << ((jb * BT + col) % 32))) != 0


@triton.jit
def popcount(x):
    """Bits set in each 32-bit number."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit
def exp2(x, NATIVE: tl.constexpr):
    """2^x; on a GPU without the care for denormal results, which takes more than the rest."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def decays(
    c_i, low_i, c_j, low_j, factor_j, mask, tile, PRECISE: tl.constexpr, NATIVE: tl.constexpr
):
    """2^(c_i - c_j), times a factor per column, where `mask`, else 0.

    Masked first: where j is no ancestor of i, the exponential would overflow.
    """
    gap = tile + c_i[:, None] - c_j[None, :]
    if PRECISE:
        gap += low_i[:, None] - low_j[None, :]
    decay = exp2(tl.where(mask, gap, float("-inf")), NATIVE)
    if PRECISE:
        decay *= factor_j[None, :]
    return decay
