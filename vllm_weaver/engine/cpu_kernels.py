# SPDX-License-Identifier: Apache-2.0
"""PyTorch in place of vLLM's Triton code that the interpreter cannot run, or runs too slowly.

A ``vllm.general_plugins`` entry point of the opt-in site directory, so nothing here is loaded on a
GPU. It uses vLLM's own registry, through which a platform brings implementations of kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def register() -> None:
    """Register the replacements in this process. Idempotent."""
    if torch.cuda.is_available():
        return
    from vllm_weaver.engine import compat

    compat.replace_triton_kernels(
        {
            "apply_top_k_top_p_triton": top_k_top_p,
            "zero_kv_blocks_kernel": zero_blocks,
            "gumbel_sample_kernel": _gumbel_sample(compat.triton_kernel("gumbel_sample_kernel")),
            "apply_grammar_bitmask_kernel": apply_grammar_bitmask,
        }
    )


def top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Logits [rows, V] with all but the top-k / top-p tokens at -inf.

    The kernel calls a method of its loop counter, which is a plain number in the interpreter.

    Args:
        logits: float32 [rows, V]; may be written.
        k, p: int32 and float32 [rows], or None.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_stride: int,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    *,
    MASK_STRIDE: int,
    **launch: Any,
) -> None:
    """Set the logits of tokens that a grammar forbids to -inf, in place.

    The kernel stores under an integer mask, which the interpreter refuses.

    Args:
        logits: [rows, V].
        logits_indices: request * MASK_STRIDE + row of the request, for each mask [masks].
        cu_num_logits: first row of each request, and the number of rows.
        bitmask: one bit per allowed token, int32 [masks, >= V / 32].
        vocab_size: V.
        MASK_STRIDE: see ``logits_indices``.
        logits_stride, bitmask_stride, launch: of the kernel; not needed.
    """
    request, place = logits_indices // MASK_STRIDE, logits_indices % MASK_STRIDE
    rows = cu_num_logits[request] + place
    active = rows < cu_num_logits[request + 1]
    bits = bitmask[: len(rows), :, None] >> torch.arange(32, dtype=torch.int32)
    forbidden = ((bits & 1) == 0).flatten(1)[active, :vocab_size]
    rows = rows[active].long()
    logits[rows] = logits[rows].masked_fill(forbidden, -float("inf"))


def zero_blocks(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Zero cache blocks in every segment; the kernel's own arguments.

    The kernel is one interpreted program per kilobyte: most of the time of a short prompt.

    Args:
        seg_addrs_ptr: byte address of each segment, int64 [segments].
        seg_block_strides_ptr, seg_page_sizes_ptr: in 4-byte words, int64 [segments].
        block_ids_ptr: blocks to zero, int64.
        BLOCK_SIZE: of the kernel; not needed.
    """
    blocks = block_ids_ptr.tolist()
    columns = (seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr)
    for address, stride, page in zip(*(column.tolist() for column in columns), strict=True):
        for block in blocks:
            ctypes.memset(address + 4 * stride * block, 0, 4 * page)


def _gumbel_sample(kernel: Any) -> Any:
    """vLLM's Gumbel-max kernel, with greedy batches, which have no noise, in PyTorch."""
    names = kernel.arg_names

    def sample(*values: Any, **options: Any) -> None:
        given = {**dict(zip(names, values, strict=False)), **options}
        logits, state = given["logits_ptr"], given["expanded_idx_mapping_ptr"].long()
        # A negative index is a padding row, which the kernel samples greedily too.
        noisy = (given["temp_ptr"][state.clamp(min=0)] != 0) & (state >= 0)
        local_max, local_argmax = given["local_max_ptr"], given["local_argmax_ptr"]
        if given["logits_cache_ptr"] is not None or bool(noisy.any()):
            kernel[tuple(local_max.shape)](*values, **options)
            return
        size, blocks = given["BLOCK_SIZE"], local_max.shape[1]
        padding = blocks * size - logits.shape[1]
        padded = torch.nn.functional.pad(logits.float(), (0, padding), value=-torch.inf)
        best, place = padded.unflatten(1, (blocks, size)).max(-1)
        local_max.copy_(best)
        local_argmax.copy_(place + size * torch.arange(blocks))

    return sample
