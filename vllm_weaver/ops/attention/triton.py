# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tree attention in Triton: paged prefix, then the tree's rows under the ancestor bitmask.

A program owns up to BLOCK_M query rows of one key/value head of one request (rows are packed as
node * G + group head, so grouped queries share every key tile). Its keys form one list of
BLOCK_N-wide tiles, the prefix's first and the tree's rows after them, which an online softmax
walks. With few requests the list is cut into SPLITS even pieces (split-KV), each written with its
log-sum-exp, and a second kernel merges them. Every length is read on the device, so a captured
CUDA graph may be replayed with other lengths and trees.

The module knows nothing of vLLM. Its definition is `reference.tree_attention_reference`.
"""

import math
from typing import Any, NamedTuple, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_SPLIT_KEYS = 256
"""A split walks at least this many keys: shorter ones would not pay for the second kernel."""
MAX_SPLITS = 64
MERGE_ROWS = 16
"""Query rows per program of the second kernel."""


class Tiling(NamedTuple):
    """Launch shape of the first kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _softmax_step(q, k, v, keep, top, total, acc, scale_log2, DOT_FLOAT32: tl.constexpr):
    """Take in a tile of keys: running maximum (base 2), sum and unnormalised output after it."""
    if DOT_FLOAT32:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(keep, scores * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row without a key so far stays at -inf; a finite base keeps its weights at exp2(-inf) = 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    weights = weights.to(v.dtype)
    if DOT_FLOAT32:
        acc = tl.dot(weights.to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _tile_plan(
    context_len, nodes, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Tiles of the prefix, tiles in all, tiles per split: the same in both kernels."""
    prefix_tiles = tl.cdiv(context_len, BLOCK_N)
    tiles = prefix_tiles + tl.cdiv(nodes, BLOCK_N)
    return prefix_tiles, tiles, tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)


@triton.jit
def tree_attention_kernel(
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_cache_ptr,
    v_cache_ptr,
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
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    DOT_FLOAT32: tl.constexpr,
):
    """Grid (row blocks, SPLITS, R * J): one split of the keys for one block of query rows.

    With SPLITS == 1 it writes `out`, else float32 `part` and its log-sum-exp in base 2.
    """
    tl.static_assert(64 % BLOCK_N == 0, "a tile of the tree must lie within one ancestor word")
    row_block = tl.program_id(0)
    split = tl.program_id(1)
    r = (tl.program_id(2) // J).to(tl.int64)
    j = (tl.program_id(2) % J).to(tl.int64)

    context_len = tl.load(context_lens_ptr + r).to(tl.int32)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    prefix_tiles, tiles, per_split = _tile_plan(context_len, nodes, SPLITS, MIN_TILES, BLOCK_N)
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
        if SPLITS == 1:
            zeros = tl.zeros((BLOCK_M, K), out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset, zeros, mask=(t < T)[:, None])
        return

    q_offset = r * q_stride_r + t * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=alive[:, None], other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, K), tl.float32)

    table = block_table_ptr + r * table_stride_r
    k_cache = k_cache_ptr + j * k_stride_h
    v_cache = v_cache_ptr + j * v_stride_h
    for tile in range(first, tl.minimum(last, prefix_tiles)):
        position = tile * BLOCK_N + col
        inside = position < context_len
        if PAGE % BLOCK_N == 0:
            block = tl.load(table + tile * BLOCK_N // PAGE).to(tl.int64)
            slot = tile * BLOCK_N % PAGE + col
        else:
            block = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
            slot = position % PAGE
        k_offset = block * k_stride_block + slot * k_stride_slot
        v_offset = block * v_stride_block + slot * v_stride_slot
        # Slots past the context may hold NaN, and 0 * NaN would pass the softmax's zero weight.
        k = tl.load(k_cache + k_offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_cache + v_offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        top, total, acc = _softmax_step(
            q, k, v, inside[None, :], top, total, acc, scale_log2, DOT_FLOAT32
        )

    # Parents come before children, so the last row of this block sees no tile beyond its own.
    last_row = tl.minimum(nodes, (row_block * BLOCK_M + BLOCK_M - 1) // G + 1)
    k_new = k_new_ptr + r * k_new_stride_r + j * k_new_stride_h
    v_new = v_new_ptr + r * v_new_stride_r + j * v_new_stride_h
    words = ancestors_ptr + r * ancestors_stride_r + t * ancestors_stride_t
    for tile in range(
        tl.maximum(first, prefix_tiles),
        tl.minimum(last, prefix_tiles + tl.cdiv(last_row, BLOCK_N)),
    ):
        start = (tile - prefix_tiles) * BLOCK_N
        node = start + col
        present = node < nodes
        word = tl.load(words + start // 64, mask=alive, other=0)
        bit = (word[:, None] >> (start % 64 + col)[None, :].to(tl.int64)) & 1
        k = tl.load(
            k_new + node[:, None] * k_new_stride_t + dim[None, :],
            mask=present[:, None],
            other=0.0,
        )
        v = tl.load(
            v_new + node[:, None] * v_new_stride_t + dim[None, :],
            mask=present[:, None],
            other=0.0,
        )
        keep = (bit != 0) & present[None, :]
        top, total, acc = _softmax_step(q, k, v, keep, top, total, acc, scale_log2, DOT_FLOAT32)

    total = tl.where(total > 0.0, total, 1.0)
    out = acc / total[:, None]
    if SPLITS == 1:
        out = tl.where(alive[:, None], out, 0.0)
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None])
    else:
        part_row = (tl.program_id(2).to(tl.int64) * SPLITS + split) * T * G + row
        tl.store(part_ptr + part_row[:, None] * K + dim[None, :], out, mask=alive[:, None])
        tl.store(part_lse_ptr + part_row, top + tl.log2(total), mask=alive)


@triton.jit
def merge_splits_kernel(
    part_ptr,
    part_lse_ptr,
    context_lens_ptr,
    num_nodes_ptr,
    out_ptr,
    T,
    J,
    G: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Grid (row blocks, R * J): merge the splits of `tree_attention_kernel`; dead rows get 0."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rj = tl.program_id(1).to(tl.int64)
    r = rj // J
    context_len = tl.load(context_lens_ptr + r).to(tl.int32)
    nodes = tl.minimum(tl.load(num_nodes_ptr + r).to(tl.int32), T)
    _, tiles, per_split = _tile_plan(context_len, nodes, SPLITS, MIN_TILES, BLOCK_N)
    t = row // G
    alive = t < nodes
    dim = tl.arange(0, K)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, K), tl.float32)
    for split in range(0, tl.cdiv(tiles, per_split)):
        part_row = (rj * SPLITS + split) * T * G + row
        lse = tl.load(part_lse_ptr + part_row, mask=alive, other=float("-inf"))
        part = tl.load(
            part_ptr + part_row[:, None] * K + dim[None, :], mask=alive[:, None], other=0.0
        )
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - base)
        decay = tl.exp2(top - base)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        top = new_top
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_offset = ((r * T + t) * J * G + (rj % J) * G + row % G)[:, None] * K + dim[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None])


INTERPRETED = not isinstance(tree_attention_kernel, triton.runtime.JITFunction)


def choose_tiling(rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Launch shape for `rows` = T * G packed query rows.

    Chosen so that no register spills on sm_80, sm_90 and sm_100.
    """
    wanted = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:
        block_m = min(wanted, 32)
        return Tiling(block_m, block_n=16, num_warps=4 if block_m == 16 else 8, num_stages=2)
    block_m = min(wanted, 64)
    if head_dim <= 64:
        return Tiling(block_m, block_n=64, num_warps=4, num_stages=2)
    if head_dim == 128:
        return Tiling(block_m, block_n=32, num_warps=4, num_stages=3)
    return Tiling(block_m, block_n=32, num_warps=8, num_stages=2)


def choose_splits(programs: int, capacity: int, device: torch.device) -> int:
    """Splits that fill the device twice over, from launch-time facts: lengths stay on the device.

    Args:
        programs: programs of an unsplit launch.
        capacity: keys that the block table and the tree can hold together.
    """
    if device.type != "cuda":
        return 1
    target = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(target // programs, math.ceil(capacity / MIN_SPLIT_KEYS), MAX_SPLITS))


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
    splits: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
) -> Tensor:
    """Launch the kernels; tensors as in `vllm_weaver.ops.attention.tree_attention`.

    Args:
        splits: pieces that each request's keys are cut into at most; None chooses for the device.
        min_split_keys: keys below which a piece is not cut further.

    Raises:
        ValueError: head dim, dtype, stride or device that the kernel does not take.
    """
    R, T, H, K = q.shape
    J = k_new.shape[2]
    page = k_cache.shape[1]
    _check_supported(q, k_new, v_new, k_cache, v_cache)
    out = torch.empty((R, T, H, K), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    # Small index tensors: a view with odd strides is copied on the device.
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    ancestors = ancestors if ancestors.stride(-1) == 1 else ancestors.contiguous()
    context_lens, num_nodes = context_lens.contiguous(), num_nodes.contiguous()

    rows = T * (H // J)
    tiling = choose_tiling(rows, K, q.dtype)
    row_blocks = triton.cdiv(rows, tiling.block_m)
    if splits is None:
        capacity = block_table.shape[1] * page + T
        splits = choose_splits(row_blocks * R * J, capacity, q.device)
    part = part_lse = out
    if splits > 1:
        part = torch.empty((R * J, splits, rows, K), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((R * J, splits, rows), dtype=torch.float32, device=q.device)
    shape: dict[str, Any] = {
        "G": H // J,
        "K": K,
        "BLOCK_N": tiling.block_n,
        "SPLITS": splits,
        "MIN_TILES": max(1, min_split_keys // tiling.block_n),
    }
    tree_attention_kernel[(row_blocks, splits, R * J)](
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        ancestors,
        num_nodes,
        out,
        part,
        part_lse,
        scale * math.log2(math.e),
        T,
        J,
        *q.stride()[:3],
        *k_new.stride()[:3],
        *v_new.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *ancestors.stride()[:2],
        PAGE=page,
        BLOCK_M=tiling.block_m,
        # The interpreter multiplies the raw bits of bfloat16; float32 holds the same values.
        DOT_FLOAT32=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **shape,
    )
    if splits > 1:
        merge_splits_kernel[(triton.cdiv(rows, MERGE_ROWS), R * J)](
            part, part_lse, context_lens, num_nodes, out, T, J, BLOCK_M=MERGE_ROWS, **shape
        )
    return out


def _check_supported(*tensors: Tensor) -> None:
    q = tensors[0]

    def unsupported(line: str) -> NoReturn:
        refuse("tree_attention", f'the triton backend {line}: use backend="reference"')

    if q.device.type != "cuda" and not INTERPRETED:
        unsupported(f"cannot run on {q.device.type} tensors without TRITON_INTERPRET=1")
    if q.shape[-1] not in HEAD_DIMS:
        unsupported(f"takes head dims {HEAD_DIMS}, got {q.shape[-1]}")
    if q.dtype not in DTYPES:
        unsupported(f"takes float16, bfloat16 and float32, got {q.dtype}")
    for name, tensor in zip(("q", "k_new", "v_new", "k_cache", "v_cache"), tensors, strict=True):
        if tensor.stride(-1) != 1:
            unsupported(f"needs unit stride in the last dimension, {name} has {tensor.stride()}")
