# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor that reads two tokens back, as no branch of a tree may."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class ForbidSums(LogitsProcessor):
    """Forbids tokens congruent modulo 4 to the sum of the two tokens before them."""

    def __init__(self, vllm_config, req_states):
        self.states = req_states

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        history = self.states.all_token_ids.gpu
        for row in range(len(logits)):
            if int(ctx.expanded_local_pos[row]) > 0:
                before = ctx.input_ids[row - 1]
            else:
                position = max(int(ctx.pos[row]) - 1, 0)
                before = history[ctx.expanded_idx_mapping[row], position]
            start = (int(before) + int(ctx.input_ids[row])) % 4
            logits[row, start::4] = -float("inf")
        return logits
