# SPDX-License-Identifier: Apache-2.0
"""PyTorch in place of vLLM's Triton code that the interpreter cannot run.

A ``vllm.general_plugins`` entry point of the opt-in site directory, so nothing here is loaded on a
GPU. It uses vLLM's own registry, through which a platform brings implementations of kernels.
"""

from __future__ import annotations

import warnings

import torch

TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton"


def register() -> None:
    """Register the replacements in this process. Idempotent."""
    from vllm.triton_utils import dispatcher

    if torch.cuda.is_available() or TOP_K_TOP_P in dispatcher._registry:
        return
    with warnings.catch_warnings():
        # It looks at every attribute of every module, deprecated ones included.
        warnings.simplefilter("ignore")
        dispatcher.register_kernels({TOP_K_TOP_P: top_k_top_p})


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
