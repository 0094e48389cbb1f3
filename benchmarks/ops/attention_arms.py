# SPDX-License-Identifier: Apache-2.0
"""Other libraries' attention under a tree's mask, for `benchmarks.ops.attention`.

Each arm is prepared for one case and all copies of its cache (masks, plans, gathered keys), which
is not timed, and then called with the case and the number of a copy. A library that is missing, or
that does not import, gives a line that says so in place of an arm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.ops.attention.reference import ancestor_mask

Prepared = Callable[[Any, int], Tensor]


@dataclass(frozen=True)
class Foreign:
    """How an arm is made, and what it leaves out."""

    prepare: Callable[[Any], Prepared]
    leaves_out: str
    one_tree: bool = False
    """All requests of a batch have one mask."""


def others(chosen: Collection[str]) -> dict[str, Foreign | str]:
    """Arms of the chosen libraries (keys of `LIBRARIES`) by name, or why there is none."""
    found: dict[str, Foreign | str] = {}
    for library, (module, arms) in LIBRARIES.items():
        if library not in chosen:
            continue
        problem = importing(module)
        for name, arm in arms.items():
            found[name] = problem or arm
    return found


def importing(module: str) -> str | None:
    """Import a module; what is wrong, if anything."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return f"not installed ({error})"
        return f"does not import: {error!r}"[:300]
    except Exception as error:
        return f"does not import: {error!r}"[:300]
    return None


def gather_context(case: Any, copy: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a copy's contexts side by side, [R, C, J, K]."""
    position = torch.arange(case.context, device=case.q.device)
    ids = case.tables[copy][:, position // case.shapes.page].long()
    places = (position % case.shapes.page).expand_as(ids)
    return case.k_cache[ids, places], case.v_cache[ids, places]


def prepare_sdpa(case: Any) -> Prepared:
    """PyTorch's attention; query heads of a group are rows, so that no key is copied."""
    R, T, H, K = case.q.shape
    J = case.shapes.kv_heads
    G = H // J
    gathered = [
        [
            torch.cat([old, new], dim=1).transpose(1, 2).contiguous()
            for old, new in zip(gather_context(case, copy), (case.k_new, case.v_new), strict=True)
        ]
        for copy in range(case.copies)
    ]
    tree = ancestor_mask(case.ancestors, T)
    mask = torch.cat([tree.new_ones(R, T, case.context), tree], dim=2)
    mask = mask[:, None, :, None].expand(R, 1, T, G, -1).reshape(R, 1, T * G, -1)

    def run(case: Any, copy: int) -> Tensor:
        q = case.q.view(R, T, J, G, K).transpose(1, 2).reshape(R, J, T * G, K)
        out = F.scaled_dot_product_attention(q, *gathered[copy], attn_mask=mask, scale=case.scale)
        return out.view(R, J, T, G, K).transpose(1, 2).reshape(R, T, H, K)

    return run


def prepare_xformers(case: Any, blocks: tuple[int, int, int, int] | None = None) -> Prepared:
    """xformers' `tree_attention` over gathered keys; one tree for the whole batch.

    `blocks` (rows, keys, warps, stages) is the form of the prefix's launch; None leaves it to
    xformers. Both parts are its split-K kernel in Triton: the wheel's own extension is not needed.
    """
    attention = import_module("xformers.ops.tree_attention")
    bias = import_module("xformers.ops.fmha.attn_bias")
    R, T, H, K = case.q.shape
    J = case.shapes.kv_heads
    tree = ancestor_mask(case.ancestors, T)
    if not bool((tree == tree[:1]).all()):
        raise ValueError("requests have different trees; tree_attention takes one mask")
    if abs(case.scale * K**0.5 - 1) > 1e-6:
        raise ValueError(f"scale {case.scale}; tree_attention takes 1 / sqrt({K}) alone")
    prefix = bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[T] * R,
        kv_padding=case.context,
        kv_seqlen=[case.context] * R,
        device=case.q.device,
    )
    mask = torch.zeros(T, T, dtype=case.q.dtype, device=case.q.device)
    mask = mask.masked_fill(~tree[0], float("-inf"))
    # Named, since the choice among its kernels raises a TypeError in xformers 0.0.35. It is the one
    # meant to be chosen up to 128 groups of a batch and 64 rows of a tree.
    op = import_module("xformers.ops.fmha.triton_splitk").FwOp
    # Its check asks for the wheel's extension all the same.
    import_module("xformers.ops.fmha.common")._built_with_cuda = True
    if blocks is not None:
        form = dict(zip(("block_m", "block_n", "num_warps", "num_stages"), blocks, strict=True))
        op = op.get_operator(None, **form)

    def grouped(x: Tensor) -> Tensor:
        # Key/value heads are xformers' groups; the query heads of a group share keys by expansion.
        return x[:, :, :, None].expand(*x.shape[:3], H // J, K)

    contexts = [[grouped(x) for x in gather_context(case, copy)] for copy in range(case.copies)]
    fresh = [grouped(x) for x in (case.k_new, case.v_new)]

    def run(case: Any, copy: int) -> Tensor:
        q = case.q.view(R, T, J, H // J, K)
        out: Tensor = attention.tree_attention(
            q, *fresh, *contexts[copy], mask, prefix, prefix_op=op
        )
        return out.reshape(R, T, H, K)

    return run


def prepare_flashinfer(case: Any) -> Prepared:
    """FlashInfer's paged prefill with a custom mask over context and tree; rows in the cache.

    A plan names the pages, so each copy of the cache has one.
    """
    flashinfer = import_module("flashinfer")
    R, T, H, K = case.q.shape
    device, page, length = case.q.device, case.shapes.page, case.context + T
    pages = -(-length // page)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    out = torch.empty(R * T, H, K, dtype=case.q.dtype, device=device)
    tree = ancestor_mask(case.ancestors, T)
    mask = torch.cat([tree.new_ones(R, T, case.context), tree], dim=2).flatten()
    starts = torch.arange(R + 1, dtype=torch.int32, device=device)

    def plan(copy: int) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            starts * T,
            starts * pages,
            case.tables[copy][:, :pages].flatten().contiguous(),
            torch.full((R,), (length - 1) % page + 1, dtype=torch.int32, device=device),
            H,
            case.shapes.kv_heads,
            K,
            page,
            custom_mask=mask,
            sm_scale=case.scale,
            q_data_type=case.q.dtype,
            kv_data_type=case.k_cache.dtype,
        )
        return wrapper

    plans = [plan(copy) for copy in range(case.copies)]

    def run(case: Any, copy: int) -> Tensor:
        # Without `out` each call would also zero a new tensor.
        plans[copy].run(case.q.view(-1, H, K), (case.k_cache, case.v_cache), out=out)
        return out.view(R, T, H, K)

    return run


_GATHERED = "pages: keys gathered beforehand, not timed"
_XFORMERS = (
    f"{_GATHERED} (its pages are multiples of 64 slots, slots before heads); a tree of its own for "
    "each request of a batch; shared reads of a tree's rows by a group's query heads"
)
XFORMERS_BLOCKS = ((64, 64, 4, 2), (128, 32, 8, 3))
"""Forms beside xformers' choice (16 rows, 64 keys, 2 warps, 1 stage at a head dim of 256)."""
LIBRARIES: dict[str, tuple[str, dict[str, Foreign]]] = {
    "sdpa": (
        "torch",
        {"sdpa, dense mask": Foreign(prepare_sdpa, _GATHERED)},
    ),
    "flashinfer": (
        "flashinfer",
        {
            "flashinfer, custom mask": Foreign(
                prepare_flashinfer, "Hopper's instructions: its FA3 kernels take no custom mask"
            )
        },
    ),
    "xformers": (
        "xformers.ops.tree_attention",
        {"xformers tree_attention": Foreign(prepare_xformers, _XFORMERS, one_tree=True)}
        | {
            f"xformers tree_attention, {blocks}": Foreign(
                partial(prepare_xformers, blocks=blocks), _XFORMERS, one_tree=True
            )
            for blocks in XFORMERS_BLOCKS
        },
    ),
}
"""Per library the module that it takes and its arms."""
