# SPDX-License-Identifier: Apache-2.0
"""The sampler's noise for the candidates of the next trees.

vLLM draws argmax(log p + G) with noise keyed by (request seed, position of the row, token). A tree
whose candidates are ranked with that noise holds more often what will be drawn. Knows vLLM's
sampling states; does not know trees or how candidates are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_weaver.ops import keyed_gumbel
from vllm_weaver.tree import Sampling, SharedNoise


class SamplerNoise:
    """Seeds and sampling parameters of a batch's requests, as vLLM's sampler will use them.

    They are copied to addresses that stay, for a graph to read. Makes the sampler draw every token
    with keyed noise: vLLM's fused samplers, which serve batches without seeds, draw the same
    distribution with noise of their own, which no tree can know.

    Attributes:
        looks: whether the host may choose by batch what is computed. A graph would freeze that.
    """

    def __init__(self, sampler: Any, max_requests: int, device: torch.device):
        self.states = sampler.sampling_states
        self.use_fp64: bool = sampler.use_fp64_gumbel
        sampler.use_flashinfer = sampler.use_xpu_sampler = False
        self.looks = device.type == "cpu"
        self.seeds = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.sampling = Sampling(
            temperature_R=torch.zeros(max_requests, dtype=torch.float32, device=device),
            top_k_R=torch.ones(max_requests, dtype=torch.int32, device=device),
            top_p_R=torch.ones(max_requests, dtype=torch.float32, device=device),
            min_p_R=torch.zeros(max_requests, dtype=torch.float32, device=device),
            filtered=True,
        )
        self._greedy = False

    def parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is to be copied for a batch: values of all slots, and where those of it belong."""
        states = self.states
        by_slot = (states.seeds, states.temperature, states.top_k, states.top_p, states.min_p)
        return [x.gpu for x in by_slot], [self.seeds, *self.sampling.parameters()]

    def look(self, slots_np: np.ndarray) -> None:
        """Choose what the batch in these slots needs, where the host may."""
        states = self.states
        if self.looks:
            self._greedy = not states.temperature.np[slots_np].any()
            self.sampling.filtered = bool(
                (states.top_k.np[slots_np] < states.vocab_size).any()
                or (states.top_p.np[slots_np] < 1).any()
                or states.min_p.np[slots_np].any()
            )

    def of(self, positions_RD: torch.Tensor, ids_RDP: torch.Tensor) -> SharedNoise | None:
        """Noise of the candidates of the batch's first R requests; None if none is needed.

        Args:
            positions_RD: position of the token of each depth, int64; the row above draws it.
            ids_RDP: candidates, int64.
        """
        if self._greedy:
            return None
        rows = ids_RDP.shape[0]
        noise_RDP = keyed_gumbel(
            self.seeds[:rows], positions_RD, ids_RDP, use_fp64=self.use_fp64, shift=-1
        )
        return SharedNoise(noise_RDP, self.sampling.first(rows))
