# SPDX-License-Identifier: Apache-2.0
"""A FlashAttention function as the prefix kernel of backend "fa3".

Nothing is imported here: the caller brings the function, such as vLLM's
`flash_attn_varlen_func`, whose names of arguments are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ARGUMENTS = (
    *("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale"),
    *("causal", "block_table", "return_softmax_lse", "fa_version", "num_splits"),
)
"""Names of arguments that the function must have."""


class FlashPrefix:
    """`PrefixAttention` by a FlashAttention function for sequences of various lengths.

    It asks for no causal mask and for the log-sum-exp. Lengths are read on the device, so its
    launches can be captured in a CUDA graph.

    Args:
        function: with vLLM's signature.
        version: of FlashAttention; 3 on Hopper.
        num_splits: pieces of the keys; 0 lets the kernel choose.
        options: other arguments of the function, such as `scheduler_metadata`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        version: int = 3,
        num_splits: int = 0,
        **options: Any,
    ) -> None:
        self.function = function
        self._options = {"fa_version": version, "num_splits": num_splits, **options}
        self._starts: dict[tuple[int, int, torch.device], Tensor] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        *,
        rows: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output [R * T, H, D_h] and log-sum-exp [H, R * T] of the prefix part."""
        out, lse = self.function(
            q,
            k_cache,
            v_cache,
            max_seqlen_q=rows,
            cu_seqlens_q=self.starts_of(len(context_lens), rows, q.device),
            max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
            seqused_k=context_lens,
            softmax_scale=scale,
            causal=False,
            block_table=block_table,
            return_softmax_lse=True,
            **self._options,
        )[:2]
        return out, lse

    def starts_of(self, requests: int, rows: int, device: torch.device) -> Tensor:
        """First query row of each request, and their end: [R + 1] int32."""
        key = (requests, rows, device)
        starts = self._starts.get(key)
        if starts is None:
            starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
            # A captured graph's tensor has no contents before the first replay: not kept.
            if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._starts[key] = starts
        return starts
