# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tree attention in Triton: paged prefix, then the tree's rows under the ancestor bitmask.

A program owns up to BLOCK_M query rows of one key/value head of one request (rows are packed as
node * G + group head, so grouped queries share every key tile). Its keys form one list of
BLOCK_N-wide tiles, the prefix's first and the tree's rows after them, which an online softmax
walks. Whole tiles of the prefix go through a pipelined loop without masks; its last, partial tile
and the tree's rows follow under masks. With few requests the list is cut into SPLITS even pieces
(split-KV), each written with its log-sum-exp, and a second kernel merges them. Every length is read
on the device, so a captured CUDA graph may be replayed with other lengths and trees.

The module knows nothing of vLLM. Its definition is `reference.tree_attention_reference`.
"""

import math
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.attention.tiling import (
    Tiling,
    capability_of,
    choose_splits,
    choose_tiling,
    least_split_keys,
    multiprocessors,
)
from vllm_weaver.ops.dispatch import refuse

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MERGE_CHUNK = 16
"""Splits that a program of the second kernel reads at a time."""


@triton.jit
def take_tile(
    q, k, v, keep, top, total, acc, scale_log2, MASKED: tl.constexpr, DOT_FLOAT32: tl.constexpr
):
    """Take in a tile of keys: running maximum of q . k, sum and unnormalised output after it.

    Without MASKED `keep` is not looked at, and the scale must be positive.
    """
    if DOT_FLOAT32:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    if MASKED:
        # A row without a key so far stays at -inf; a finite base keeps its weights at zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) * scale_log2
    else:
        base = new_top * scale_log2
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(top * scale_log2 - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if DOT_FLOAT32:
        weights = weights.to(v.dtype).to(tl.float32)
        acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def ancestor_bits(words, start, alive, T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ancestor bits [BLOCK_M, BLOCK_N] of the rows `start` and on; `words`: int32 words by row."""
    col = tl.arange(0, BLOCK_N)
    bits = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for half in tl.static_range((BLOCK_N + 31) // 32):
        # Columns past T have no word of their own, and the caller masks them.
        index = tl.minimum(start // 32 + half, tl.cdiv(T, 64) * 2 - 1)
        word = tl.load(words + index, mask=alive, other=0)
        bits = tl.where((col // 32 == half)[None, :], word[:, None], bits)
    return (bits >> ((start + col) % 32)[None, :]) & 1


@triton.jit
def round_to_cache(rows, scale):
    """Fresh rows as a float8 (e4m3) cache holds them, in float32: divided, saturated, rounded.

    To the nearest even multiple of 2^(exponent - 3), or of 2^-9 for the smallest, by adding and
    taking off a number so large that float32 keeps no smaller step.
    """
    wide = tl.math.div_rn(rows.to(tl.float32), tl.zeros_like(rows).to(tl.float32) + scale)
    wide = tl.minimum(tl.maximum(wide, -448.0), 448.0)
    exponent = (wide.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # 1.5 * 2^23 steps, as the bits of a float32.
    large = ((tl.maximum(exponent - 3, 127 - 9) + 23) << 23) | 0x400000
    large = large.to(tl.float32, bitcast=True)
    return (wide + large) - large


@triton.jit
def _tile_plan(context_len, nodes, splits, min_tiles, BLOCK_N: tl.constexpr):
    """Tiles of the prefix, tiles in all, tiles per split: the same in both kernels."""
    prefix_tiles = tl.cdiv(context_len, BLOCK_N)
    tiles = prefix_tiles + tl.cdiv(nodes, BLOCK_N)
    return prefix_tiles, tiles, tl.maximum(tl.cdiv(tiles, splits), min_tiles)


@triton.jit
def _blocks_of(table, start, context_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache blocks of the first and the last position of a tile, which reaches over two at most."""
    last = context_len - 1
    some = context_len > 0
    first_block = tl.load(table + tl.minimum(start, last) // PAGE, mask=some, other=0)
    if PAGE % BLOCK_N == 0:
        return first_block, first_block
    end = tl.minimum(start + BLOCK_N - 1, last)
    return first_block, tl.load(table + end // PAGE, mask=some, other=0)


@triton.jit
def _rows_of(
    block_a,
    block_b,
    start,
    stride_block,
    stride_slot,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets of a tile's cache rows, [BLOCK_N], from the two blocks that it lies in.

    One 64-bit base and, for rows of the second block, a step: no look-up for each row.
    """
    col = tl.arange(0, BLOCK_N)
    slot = start % PAGE
    base = block_a.to(tl.int64) * stride_block + slot * stride_slot
    if PAGE % BLOCK_N != 0:
        # A product where a choice would do: it keeps what is known of the alignment.
        step = (block_b - block_a).to(tl.int64) * stride_block - PAGE * stride_slot
        return base + (slot + col >= PAGE).to(tl.int64) * step + col * stride_slot
    return base + col * stride_slot


@triton.jit(
    do_not_specialize=[
        *("T", "splits", "min_tiles"),
        *("table_stride_r", "ancestors_stride_r", "ancestors_stride_t"),
    ]
)
def tree_attention_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    block_table_ptr,
    context_lens_ptr,
    ancestors_ptr,
    num_nodes_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    scale_log2,
    T,
    J,
    splits,
    min_tiles,
    q_stride_r,
    q_stride_t,
    q_stride_h,
    k_new_stride_r,
    k_new_stride_t,
    k_new_stride_h,
    v_new_stride_r,
    v_new_stride_t,
    v_new_stride_h,
    k_stride_block,
    k_stride_slot,
    k_stride_h,
    v_stride_block,
    v_stride_slot,
    v_stride_h,
    table_stride_r,
    ancestors_stride_r,
    ancestors_stride_t,
    G: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    DOT_FLOAT32: tl.constexpr,
):
    """Grid (row blocks, splits, R * J): one split of the keys for one block of query rows.

    It writes `out`, or with SPLIT float32 `part` and its log-sum-exp in base 2. With FP8
    the caches are float8, their scales are read, and the tree's rows are rounded like the cache's.
    SAME_ROWS: both caches have the same strides, so that offsets of keys are those of values.
    """
    row_block = tl.program_id(0)
    split = tl.program_id(1)
    r = (tl.program_id(2) // J).to(tl.int64)
    j = (tl.program_id(2) % J).to(tl.int64)

    context_len = tl.load(context_lens_ptr + r).to(tl.int32)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    prefix_tiles, tiles, per_split = _tile_plan(context_len, nodes, splits, min_tiles, BLOCK_N)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)

    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    t = row // G
    head = j * G + row % G
    alive = t < nodes
    col = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, K)
    out_offset = ((r * T + t) * J * G + head)[:, None] * K + dim[None, :]

    if row_block * BLOCK_M // G >= nodes or first >= tiles:
        if not SPLIT:
            zeros = tl.zeros((BLOCK_M, K), out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset, zeros, mask=(t < T)[:, None])
        return

    q_offset = r * q_stride_r + t * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=alive[:, None], other=0.0)
    k_scale = 1.0
    v_scale = 1.0
    if FP8:
        k_scale = tl.load(k_scale_ptr).to(tl.float32)
        v_scale = tl.load(v_scale_ptr).to(tl.float32)
        scale_log2 *= k_scale
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, K), tl.float32)

    table = block_table_ptr + r * table_stride_r
    k_cache = k_cache_ptr + j * k_stride_h
    v_cache = v_cache_ptr + j * v_stride_h
    # Whole tiles.
    full_tiles = context_len // BLOCK_N
    block_a = 0
    block_b = 0
    if PAGE >= BLOCK_N:
        block_a, block_b = _blocks_of(table, first * BLOCK_N, context_len, PAGE, BLOCK_N)
    for tile in range(first, tl.minimum(last, full_tiles)):
        start = tile * BLOCK_N
        if PAGE >= BLOCK_N:
            # Blocks are looked up a tile ahead: in their own tile they would hold up its loads.
            next_a, next_b = _blocks_of(table, start + BLOCK_N, context_len, PAGE, BLOCK_N)
            k_row = _rows_of(block_a, block_b, start, k_stride_block, k_stride_slot, PAGE, BLOCK_N)
            v_row = k_row
            if not SAME_ROWS:
                v_row = _rows_of(
                    block_a, block_b, start, v_stride_block, v_stride_slot, PAGE, BLOCK_N
                )
            block_a = next_a
            block_b = next_b
        else:
            position = start + col
            block = tl.load(table + position // PAGE).to(tl.int64)
            k_row = block * k_stride_block + position % PAGE * k_stride_slot
            v_row = k_row
            if not SAME_ROWS:
                v_row = block * v_stride_block + position % PAGE * v_stride_slot
        k = tl.load(k_cache + k_row[:, None] + dim[None, :])
        v = tl.load(v_cache + v_row[:, None] + dim[None, :])
        if FP8:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        top, total, acc = take_tile(q, k, v, None, top, total, acc, scale_log2, False, DOT_FLOAT32)

    # The prefix's partial tile, then the tree. Parents come before children, so the last row of
    # this block sees no tile beyond its own. Slots past the context and rows past the tree may
    # hold NaN, and 0 * NaN would pass the softmax's zero weight: they are not loaded.
    last_row = tl.minimum(nodes, (row_block * BLOCK_M + BLOCK_M - 1) // G + 1)
    k_new = k_new_ptr + r * k_new_stride_r + j * k_new_stride_h
    v_new = v_new_ptr + r * v_new_stride_r + j * v_new_stride_h
    words = ancestors_ptr + r * ancestors_stride_r + t * ancestors_stride_t
    for tile in tl.range(
        tl.maximum(first, full_tiles),
        tl.minimum(last, prefix_tiles + tl.cdiv(last_row, BLOCK_N)),
        num_stages=1,
    ):
        of_prefix = tile < prefix_tiles
        position = tile * BLOCK_N + col
        inside = position < tl.where(of_prefix, context_len, 0)
        block = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        slot = position % PAGE
        k_row = block * k_stride_block + slot * k_stride_slot
        v_row = block * v_stride_block + slot * v_stride_slot
        first_node = tl.maximum(tile - prefix_tiles, 0) * BLOCK_N
        node = first_node + col
        present = node < tl.where(of_prefix, 0, nodes)
        k_node = node * k_new_stride_t
        v_node = node * v_new_stride_t
        if FP8:
            of_cache = inside[:, None]
            of_tree = present[:, None]
            k = tl.load(k_cache + k_row[:, None] + dim[None, :], mask=of_cache).to(q.dtype)
            fresh = tl.load(k_new + k_node[:, None] + dim[None, :], mask=of_tree, other=0.0)
            fresh = round_to_cache(fresh, k_scale).to(q.dtype)
            k = tl.where(of_cache, k, fresh)
            v = tl.load(v_cache + v_row[:, None] + dim[None, :], mask=of_cache).to(q.dtype)
            fresh = tl.load(v_new + v_node[:, None] + dim[None, :], mask=of_tree, other=0.0)
            fresh = round_to_cache(fresh, v_scale).to(q.dtype)
            v = tl.where(of_cache, v, fresh)
        else:
            there = (inside | present)[:, None]
            k_at = tl.where(of_prefix, k_cache + k_row, k_new + k_node)
            v_at = tl.where(of_prefix, v_cache + v_row, v_new + v_node)
            k = tl.load(k_at[:, None] + dim[None, :], mask=there, other=0.0)
            v = tl.load(v_at[:, None] + dim[None, :], mask=there, other=0.0)
        bits = ancestor_bits(words, first_node, alive, T, BLOCK_M, BLOCK_N)
        keep = inside[None, :] | ((bits != 0) & present[None, :])
        top, total, acc = take_tile(q, k, v, keep, top, total, acc, scale_log2, True, DOT_FLOAT32)

    total = tl.where(total > 0.0, total, 1.0)
    out = acc * (v_scale / total)[:, None]
    if not SPLIT:
        out = tl.where(alive[:, None], out, 0.0)
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None])
    else:
        part_row = (tl.program_id(2).to(tl.int64) * splits + split) * T * G + row
        tl.store(part_ptr + part_row[:, None] * K + dim[None, :], out, mask=alive[:, None])
        tl.store(part_lse_ptr + part_row, top * scale_log2 + tl.log2(total), mask=alive)


@triton.jit(do_not_specialize=["T", "splits", "min_tiles"])
def merge_splits_kernel(
    part_ptr,
    part_lse_ptr,
    context_lens_ptr,
    num_nodes_ptr,
    out_ptr,
    T,
    J,
    splits,
    min_tiles,
    G: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (T * G, R * J): merge the splits of one row of `tree_attention_kernel`; dead rows get 0.

    CHUNK splits are read at once, so that their loads are under way together.
    """
    row = tl.program_id(0)
    rj = tl.program_id(1).to(tl.int64)
    r = rj // J
    context_len = tl.load(context_lens_ptr + r).to(tl.int32)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    _, tiles, per_split = _tile_plan(context_len, nodes, splits, min_tiles, BLOCK_N)
    t = row // G
    dim = tl.arange(0, K)
    chunk = tl.arange(0, CHUNK)
    # Scalars, but held as vectors of one element for the sake of the loop.
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((K,), tl.float32)
    written = tl.where(t < nodes, tl.cdiv(tiles, per_split), 0)
    for start in range(0, written, CHUNK):
        live = start + chunk < written
        part_row = (rj * splits + start + chunk) * T * G + row
        lse = tl.load(part_lse_ptr + part_row, mask=live, other=float("-inf"))
        part = tl.load(
            part_ptr + part_row[:, None] * K + dim[None, :], mask=live[:, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - base)
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        top = new_top
    out = acc / tl.where(total > 0.0, total, 1.0)
    out_offset = ((r * T + t) * J * G + (rj % J) * G + row % G) * K + dim
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty))


INTERPRETED = not isinstance(tree_attention_kernel, triton.runtime.JITFunction)


def tree_attention_triton(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    splits: int | None = None,
    min_split_keys: int | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Launch the kernels; tensors as in `vllm_weaver.ops.attention.tree_attention`.

    Args:
        splits: pieces that each request's keys are cut into at most; None chooses for the device.
        min_split_keys: keys below which a piece is not cut further; None chooses for the device.
        tiling: launch shape of the first kernel; None chooses by sizes and device.

    Raises:
        ValueError: head dim, dtype, stride, scale or device that the kernel does not take.
    """
    R, T, H, K = q.shape
    J = k_new.shape[2]
    page = k_cache.shape[1]
    tensors = {"q": q, "k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache}
    check_supported("triton", scale, tensors)
    out = torch.empty((R, T, H, K), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    # Small index tensors: a view with odd strides is copied on the device.
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    words = words_of(ancestors)
    context_lens, num_nodes = context_lens.contiguous(), num_nodes.contiguous()

    rows = T * (H // J)
    fp8 = k_cache.dtype != q.dtype
    capability = capability_of(q.device)
    if tiling is None:
        tiling = choose_tiling(rows, K, q.dtype, capability)
    if min_split_keys is None:
        min_split_keys = least_split_keys(capability)
    row_blocks = triton.cdiv(rows, tiling.block_m)
    if splits is None:
        capacity = block_table.shape[1] * page + T
        side_by_side = tiling.per_multiprocessor(K, k_cache.element_size())
        slots = multiprocessors(q.device) * side_by_side
        splits = choose_splits(row_blocks * R * J, capacity, slots, min_split_keys)
    part = part_lse = out
    if splits > 1:
        part = torch.empty((R * J, splits, rows, K), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((R * J, splits, rows), dtype=torch.float32, device=q.device)
    sizes = (T, J, splits, max(1, min_split_keys // tiling.block_n))
    shape: dict[str, Any] = {"G": H // J, "K": K, "BLOCK_N": tiling.block_n}
    tree_attention_kernel[(row_blocks, splits, R * J)](
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        k_scale if fp8 else out,
        v_scale if fp8 else out,
        block_table,
        context_lens,
        words,
        num_nodes,
        out,
        part,
        part_lse,
        scale * math.log2(math.e),
        *sizes,
        *q.stride()[:3],
        *k_new.stride()[:3],
        *v_new.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *words.stride()[:2],
        PAGE=page,
        BLOCK_M=tiling.block_m,
        SPLIT=splits > 1,
        SAME_ROWS=k_cache.stride() == v_cache.stride(),
        FP8=fp8,
        # The interpreter multiplies the raw bits of bfloat16; float32 holds the same values.
        DOT_FLOAT32=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **shape,
    )
    if splits > 1:
        chunk = min(triton.next_power_of_2(splits), MERGE_CHUNK)
        merge_splits_kernel[(rows, R * J)](
            *(part, part_lse, context_lens, num_nodes, out, *sizes),
            CHUNK=chunk,
            num_warps=4 if chunk * K >= 2048 else 2,
            **shape,
        )
    return out


def words_of(ancestors: Tensor) -> Tensor:
    """Ancestor words as the kernels read them: [R, T, 2 * ceil(T / 64)] int32, low half first."""
    contiguous = ancestors if ancestors.stride(-1) == 1 else ancestors.contiguous()
    return contiguous.view(torch.int32)


def check_supported(backend: str, scale: float, tensors: dict[str, Tensor]) -> None:
    """Refuse what no Triton kernel of the op takes.

    Args:
        backend: whose name a refusal has.
        scale: of the scores.
        tensors: the float tensors by name; "q" first.

    Raises:
        ValueError: the first thing that is not taken.
    """
    q = tensors["q"]

    def unsupported(line: str) -> NoReturn:
        refuse("tree_attention", f'the {backend} backend {line}: use backend="reference"')

    if q.device.type != "cuda" and not INTERPRETED:
        unsupported(f"cannot run on {q.device.type} tensors without TRITON_INTERPRET=1")
    if "k_cache" in tensors and tensors["k_cache"].dtype != q.dtype:
        capability = capability_of(q.device)
        if 0 < capability < 89:
            unsupported(f"takes float8 caches from compute capability 8.9, got {capability / 10}")
    if q.shape[-1] not in HEAD_DIMS:
        unsupported(f"takes head dims {HEAD_DIMS}, got {q.shape[-1]}")
    if q.dtype not in DTYPES:
        unsupported(f"takes float16, bfloat16 and float32, got {q.dtype}")
    if not scale > 0.0:
        unsupported(f"takes positive scales, got {scale}")
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            unsupported(f"needs unit stride in the last dimension, {name} has {tensor.stride()}")
