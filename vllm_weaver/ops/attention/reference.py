# SPDX-License-Identifier: Apache-2.0
"""Tree attention in plain PyTorch: the definition that every other backend is held to.

Spec section 6: every node attends to the whole committed context (dense, paged) and to its own
ancestors among the fresh rows of the tree; the two parts meet through their log-sum-exps.

The module knows nothing of vLLM, of RoPE (queries and keys arrive rotated) or of how slots were
assigned.

Shape suffixes beyond the common legend: H query heads; J key/value heads (HKV); G = H / J;
K head dim (D_h); M = T * G query rows that share one key/value head; C keys.
"""

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import refuse

CACHE_FLOAT8 = torch.float8_e4m3fn
"""The type of a quantised cache."""
CONTEXT_CHUNK = 4096
"""Context tokens gathered at a time: bounds the scratch memory of long contexts."""


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint sets of keys (spec section 6).

    ============  ========  =======  ======  ===================================================
    name          shape     dtype    in/out  meaning
    ============  ========  =======  ======  ===================================================
    out_a, out_b  [..., K]  float    in      normalised outputs over either set of keys
    lse_a, lse_b  [...]     float    in      natural log-sum-exp of the scaled scores
    out           [..., K]  out_a's  out     normalised output over both sets
    lse           [...]     float32  out     its log-sum-exp; -inf where both sets are empty
    ============  ========  =======  ======  ===================================================

    An infinite log-sum-exp of either sign marks an empty set (kernels in use write either); the
    output that stands beside it is not read, so it may hold anything. float64 inputs are merged in
    float64.
    """
    dtype = _compute_dtype(out_a.dtype)

    def prepare(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        empty = lse.isinf()
        return (
            out.to(dtype).masked_fill(empty[..., None], 0.0),
            lse.to(dtype).masked_fill(empty, float("-inf")),
        )

    a, la = prepare(out_a, lse_a)
    b, lb = prepare(out_b, lse_b)
    # A finite floor keeps -inf - -inf out of the exponent where both sets are empty.
    top = torch.maximum(la, lb).clamp(min=torch.finfo(dtype).min)
    wa, wb = (la - top).exp(), (lb - top).exp()
    total = wa + wb
    out = (a * wa[..., None] + b * wb[..., None]) / total.clamp(min=torch.finfo(dtype).tiny)[
        ..., None
    ]
    return out.to(out_a.dtype), top + total.log()


def ancestor_mask(ancestors_RTW: Tensor, num_columns: int) -> Tensor:
    """Unpack ancestor words [R, T, ceil(T / 64)] into a boolean mask [R, T, num_columns]."""
    column = torch.arange(num_columns, device=ancestors_RTW.device)
    words = ancestors_RTW[..., column // 64]
    return ((words >> (column % 64)) & 1).bool()


def round_to_cache(rows: Tensor, scale: Tensor) -> Tensor:
    """Fresh rows as a float8 cache with this scale holds them, in its type.

    vLLM's cache writer does the same: division by the scale in float32, saturation, rounding to
    the nearest even number.
    """
    limit = torch.finfo(CACHE_FLOAT8).max
    return (rows.float() / scale).clamp(-limit, limit).to(CACHE_FLOAT8)


def tree_attention_reference(
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
    context_chunk: int = CONTEXT_CHUNK,
) -> Tensor:
    """The definition of `vllm_weaver.ops.attention.tree_attention`, which has the tensor table.

    Accumulates in float32, or in float64 for float64 inputs. Reads the shortest and the longest
    context on the host, a synchronisation on a GPU: the reference is meant for CPUs and for tests.

    Raises:
        ValueError: a context that the block table is too narrow for.
    """
    if q.numel() == 0:
        return torch.empty_like(q)
    R, T, H, K = q.shape
    J = k_new.shape[2]
    G = H // J
    dtype = _compute_dtype(q.dtype)
    alive_RT = torch.arange(T, device=q.device) < num_nodes[:, None]

    def fresh(x: Tensor) -> Tensor:
        # Zeroed before any product: 0 * NaN would leak a dead row through the masked softmax.
        return x.masked_fill(~alive_RT[..., None, None], 0.0).to(dtype)

    def stored(x: Tensor, cache_scale: Tensor | None) -> Tensor:
        if cache_scale is None:
            return x.to(dtype)
        return x.to(dtype) * cache_scale.to(dtype)

    if k_scale is not None and v_scale is not None:
        k_new, v_new = round_to_cache(k_new, k_scale), round_to_cache(v_new, v_scale)
    k_RTJK, v_RTJK = fresh(stored(k_new, k_scale)), fresh(stored(v_new, v_scale))
    q_RJMK = (fresh(q) * scale).view(R, T, J, G, K).permute(0, 2, 1, 3, 4).reshape(R, J, T * G, K)
    keep_RTT = ancestor_mask(ancestors, T) & alive_RT[:, None, :] & alive_RT[:, :, None]
    keep_R1MT = keep_RTT[:, None, :, None, :].expand(R, 1, T, G, T).reshape(R, 1, T * G, T)
    out, lse = _attend(q_RJMK, k_RTJK.transpose(1, 2), v_RTJK.transpose(1, 2), keep_R1MT)

    shortest, longest = (int(n) for n in context_lens.aminmax())
    capacity = block_table.shape[1] * k_cache.shape[1]
    if longest > capacity:
        refuse(
            "tree_attention",
            f"context_lens holds {longest}, but the block table reaches only {capacity} tokens",
        )
    for start in range(0, longest, context_chunk):
        position_C = torch.arange(start, min(start + context_chunk, longest), device=q.device)
        # A chunk that lies within every context needs no mask.
        whole = start + len(position_C) <= shortest
        inside_RC = None if whole else position_C < context_lens[:, None]
        k_RJCK, v_RJCK = (
            stored(_gather_context(cache, block_table, position_C, inside_RC), cache_scale)
            for cache, cache_scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        keep = None if inside_RC is None else inside_RC[:, None, None, :]
        out, lse = merge_attention(out, lse, *_attend(q_RJMK, k_RJCK, v_RJCK, keep))

    out_RTHK = out.view(R, J, T, G, K).permute(0, 2, 1, 3, 4).reshape(R, T, H, K)
    return out_RTHK.masked_fill(~alive_RT[..., None, None], 0.0).to(q.dtype)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _gather_context(
    cache: Tensor, block_table: Tensor, position_C: Tensor, inside_RC: Tensor | None
) -> Tensor:
    """Keys or values at given context positions, [R, J, C, K]; zero outside a request's context.

    The gather runs on the cache as it is strided and copies only the rows asked for. Positions
    outside the context read block 0 instead of whatever the block table holds there.
    """
    page = cache.shape[1]
    block_RC = block_table[:, position_C // page].long()
    if inside_RC is not None:
        block_RC = block_RC.masked_fill(~inside_RC, 0)
    kept = cache.dtype
    if kept == CACHE_FLOAT8:
        # Indexing and filling lack float8: bytes are gathered, and the byte 0 is the number 0.
        cache = cache.view(torch.uint8)
    rows_RCJK = cache[block_RC, position_C % page]
    if inside_RC is not None:
        rows_RCJK = rows_RCJK.masked_fill(~inside_RC[..., None, None], 0)
    return rows_RCJK.view(kept).transpose(1, 2)


def _attend(
    q_RJMK: Tensor, k_RJCK: Tensor, v_RJCK: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of scaled queries over one set of keys: normalised output, log-sum-exp.

    `keep` broadcasts to [R, J, M, C], None keeps all. A row without a key gets 0 and -inf.
    """
    scores = q_RJMK @ k_RJCK.transpose(-1, -2)
    if keep is not None:
        scores.masked_fill_(~keep, float("-inf"))
    limits = torch.finfo(scores.dtype)
    top = scores.amax(dim=-1, keepdim=True).clamp(min=limits.min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return weights @ v_RJCK / total.clamp(min=limits.tiny), (top + total.log()).squeeze(-1)
