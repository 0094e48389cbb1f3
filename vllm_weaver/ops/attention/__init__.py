# SPDX-License-Identifier: Apache-2.0
"""Attention of a tree of draft tokens over a paged context (spec section 6): dispatcher and checks.

The module knows nothing of vLLM, of RoPE or of slot assignment. `reference` is the definition,
`triton` the portable kernel; `tail` joins a prefix kernel that the caller brings, such as
FlashAttention 3, with the tree's rows.
"""

import torch
from torch import Tensor

from vllm_weaver.ops.attention.reference import (
    CACHE_FLOAT8,
    merge_attention,
    tree_attention_reference,
)
from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse

__all__ = ["merge_attention", "tree_attention"]

OP = "tree_attention"

_BACKENDS = Backends(OP, tree_attention_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.attention.triton:tree_attention_triton", default_on=("cuda",)
)
_BACKENDS.register("fa3", "vllm_weaver.ops.attention.tail:tree_attention_fa3")


def tree_attention(
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
    backend: str | None = None,
) -> Tensor:
    """Attend from every node of a tree to the committed context and to the node's ancestors.

    For row i of request r the keys are the `context_lens[r]` tokens of the paged cache (all of
    them: the prefix is not causal) and the fresh rows j whose ancestor bit is set, the row itself
    included. One softmax runs over both.

    =============  ==============================  ======  ======  ==============================
    name           shape                           dtype   in/out  meaning
    =============  ==============================  ======  ======  ==============================
    q              [R, T, H, D_h]                  float   in      queries, RoPE applied
    k_new, v_new   [R, T, HKV, D_h]                q's     in      fresh rows of the tree
    k_cache,       [blocks, block_size, HKV, D_h]  q's or  in      paged context; strided views
    v_cache                                        float8          are read in place
    block_table    [R, max_blocks]                 int32   in      block of each context page;
                                                                   unused past the context
    context_lens   [R]                             int32   in      tokens before the tree, from 0
    ancestors      [R, T, ceil(T / 64)]            int64   in      bit j % 64 of word j // 64:
                                                                   row j is an ancestor of the
                                                                   row, or the row itself
    num_nodes      [R]                             int32   in      live rows, root included;
                                                                   0 for an inert request
    scale          scalar                          float   in      multiplies q . k
    k_scale,       [1] or scalar tensor            f32     in      with a float8 (e4m3) cache alone:
    v_scale                                                        a stored number times its scale
                                                                   is the key's or the value's
    out            [R, T, H, D_h]                  q's     out     zeros past `num_nodes`
    =============  ==============================  ======  ======  ==============================

    Query head h reads key/value head h // (H / HKV). Scores, softmax and sums are float32 (float64
    for float64 inputs, reference only). Rows past `num_nodes` and cache slots past the context may
    hold NaN: neither enters a product. The fresh rows' own cache slots are not read either.

    Float8 caches: k_new and v_new are the rows as they are before they are stored, and the op
    rounds them as the cache does (divided by the scale, saturated at 448, rounded to e4m3). Plain
    decoding reads every token from the cache, the newest included, so a path of the tree sees the
    keys and values that plain decoding would: with unrounded rows it would not be lossless.

    Backends: "reference" (any device, head dim and strides; synchronises with the host);
    "triton" (head dim 32, 64, 128 or 256; float16, bfloat16, float32; float8 caches from compute
    capability 8.9; unit stride in the last dimension; no host synchronisation, so it can be
    captured in a CUDA graph and replayed with other lengths); "fa3" (like "triton" without float8,
    once `tail.enable_fa3` has named a prefix kernel). None takes "triton" on a GPU, else
    "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together, or
            inputs that the chosen backend does not take.
    """
    _check(q, k_new, v_new, k_cache, v_cache, block_table, context_lens, ancestors, num_nodes)
    _check_scales(q, k_cache, {"k_scale": k_scale, "v_scale": v_scale})
    return _BACKENDS.pick(backend, q.device)(
        q,
        k_new,
        v_new,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        ancestors,
        num_nodes,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _check(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
) -> None:
    for name, tensor in (("q", q), ("k_new", k_new), ("k_cache", k_cache)):
        if tensor.dim() != 4:
            refuse(OP, f"{name} has shape {list(tensor.shape)}, expected 4 dimensions")
    R, T, H, K = q.shape
    blocks, page, J, _ = k_cache.shape
    if J == 0 or H % J:
        refuse(OP, f"q has {H} heads, not a multiple of the cache's {J} key/value heads")
    pages = block_table.shape[-1] if block_table.dim() else 0
    expected = {
        "k_new": (k_new, (R, T, J, K)),
        "v_new": (v_new, (R, T, J, K)),
        "k_cache": (k_cache, (blocks, page, J, K)),
        "v_cache": (v_cache, (blocks, page, J, K)),
        "block_table": (block_table, (R, pages)),
        "context_lens": (context_lens, (R,)),
        "ancestors": (ancestors, (R, T, (T + 63) // 64)),
        "num_nodes": (num_nodes, (R,)),
    }
    expect_shapes(OP, q.device, expected)
    expect_indices(
        OP, {"block_table": block_table, "context_lens": context_lens, "num_nodes": num_nodes}
    )
    if ancestors.dtype != torch.int64:
        refuse(OP, f"ancestors is {ancestors.dtype}, expected int64 words of 64 bits")
    if not q.is_floating_point():
        refuse(OP, f"q is {q.dtype}, expected a floating-point type")
    if k_cache.dtype not in (q.dtype, CACHE_FLOAT8):
        refuse(
            OP, f"k_cache is {k_cache.dtype}, q is {q.dtype}: a cache of q's type or {CACHE_FLOAT8}"
        )
    for name, other in (("k_new", q), ("v_new", q), ("v_cache", k_cache)):
        dtype = expected[name][0].dtype
        if dtype != other.dtype:
            than = "q" if other is q else "k_cache"
            refuse(OP, f"{name} is {dtype}, {than} is {other.dtype}")


def _check_scales(q: Tensor, k_cache: Tensor, scales: dict[str, Tensor | None]) -> None:
    for name, scale in scales.items():
        if (scale is not None) != (k_cache.dtype != q.dtype):
            refuse(OP, f"{name} goes with a float8 cache and only with one; it is {k_cache.dtype}")
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            refuse(OP, f"{name} is {list(scale.shape)} {scale.dtype}, expected one float32")
        if scale is not None and scale.device != q.device:
            refuse(OP, f"{name} is on {scale.device}, expected {q.device}: move it there")
