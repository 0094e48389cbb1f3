# SPDX-License-Identifier: Apache-2.0
"""Other libraries' attention under a tree's mask, for `benchmarks.ops.attention`.

Each arm is prepared for one case (masks, plans, gathered keys), which is not timed, and then called
with the case and the number of a cache's copy. A library that is not installed gives a line that
says so in place of an arm.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.ops.attention.reference import ancestor_mask

Prepared = Callable[[Any, int], Tensor]


def others() -> dict[str, Callable[[Any], Prepared] | str]:
    """Makers of arms by name, or why there is none."""
    found: dict[str, Callable[[Any], Prepared] | str] = {"sdpa, dense mask": prepare_sdpa}
    for name, module, prepare in (
        ("xformers tree_attention", "xformers.ops.tree_attention", prepare_xformers),
        ("flashinfer, custom mask", "flashinfer", prepare_flashinfer),
    ):
        try:
            import_module(module)
        except Exception as error:
            found[name] = f"not installed ({error!r})"[:200]
        else:
            found[name] = prepare
    return found


def gather_context(case: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of the first copy's contexts side by side, [R, C, J, K]."""
    position = torch.arange(case.context, device=case.q.device)
    ids = case.tables[0][:, position // case.shapes.page].long()
    places = (position % case.shapes.page).expand_as(ids)
    return case.k_cache[ids, places], case.v_cache[ids, places]


def prepare_sdpa(case: Any) -> Prepared:
    """PyTorch's attention; query heads of a group are rows, so that no key is copied."""
    R, T, H, K = case.q.shape
    J = case.shapes.kv_heads
    G = H // J
    k, v = (
        torch.cat([old, new], dim=1).transpose(1, 2).contiguous()
        for old, new in zip(gather_context(case), (case.k_new, case.v_new), strict=True)
    )
    tree = ancestor_mask(case.ancestors, T)
    mask = torch.cat([tree.new_ones(R, T, case.context), tree], dim=2)
    mask = mask[:, None, :, None].expand(R, 1, T, G, -1).reshape(R, 1, T * G, -1)

    def run(case: Any, copy: int) -> Tensor:
        q = case.q.view(R, T, J, G, K).transpose(1, 2).reshape(R, J, T * G, K)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)
        return out.view(R, J, T, G, K).transpose(1, 2).reshape(R, T, H, K)

    return run


def prepare_xformers(case: Any) -> Prepared:
    """xformers' `tree_attention` over gathered keys; one tree for the whole batch."""
    attention = import_module("xformers.ops.tree_attention")
    bias = import_module("xformers.ops.fmha.attn_bias")
    R, T, H, K = case.q.shape
    J = case.shapes.kv_heads
    if R != 1:
        raise ValueError("one mask for the whole batch")
    k, v = gather_context(case)
    prefix = bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[T], kv_padding=case.context, kv_seqlen=[case.context]
    )
    prefix = prefix.to(case.q.device) if hasattr(prefix, "to") else prefix
    tree = ancestor_mask(case.ancestors, T)[0]
    mask = torch.zeros(T, T, dtype=case.q.dtype, device=case.q.device)
    mask = mask.masked_fill(~tree, float("-inf"))

    def grouped(x: Tensor) -> Tensor:
        return x[:, :, :, None].expand(*x.shape[:3], H // J, K)

    def run(case: Any, copy: int) -> Tensor:
        # Groups of heads are the third dimension; heads of a group share keys by expansion.
        return attention.tree_attention(
            case.q.view(R, T, J, H // J, K),
            *(grouped(x) for x in (case.k_new, case.v_new, k, v)),
            mask,
            prefix,
        ).reshape(R, T, H, K)

    return run


def prepare_flashinfer(case: Any) -> Prepared:
    """FlashInfer's paged prefill with a custom mask over context and tree; rows in the cache."""
    flashinfer = import_module("flashinfer")
    R, T, H, K = case.q.shape
    device, page, length = case.q.device, case.shapes.page, case.context + T
    pages = -(-length // page)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    tree = ancestor_mask(case.ancestors, T)
    mask = torch.cat([tree.new_ones(R, T, case.context), tree], dim=2)
    starts = torch.arange(R + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        starts * T,
        starts * pages,
        case.tables[0][:, :pages].flatten().contiguous(),
        torch.full((R,), (length - 1) % page + 1, dtype=torch.int32, device=device),
        H,
        case.shapes.kv_heads,
        K,
        page,
        custom_mask=mask.flatten(),
        sm_scale=case.scale,
        q_data_type=case.q.dtype,
    )

    def run(case: Any, copy: int) -> Tensor:
        out: Tensor = wrapper.run(case.q.view(-1, H, K), (case.k_cache, case.v_cache))
        return out.view(R, T, H, K)

    return run
