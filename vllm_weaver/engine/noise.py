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

    def load(self, slots_R: torch.Tensor, slots_np: np.ndarray) -> None:
        """Take the parameters of the batch's requests.

        Args:
            slots_R, slots_np: request slots, on the device and on the host.
        """
        states, rows = self.states, slots_R.shape[0]
        self.seeds[:rows] = states.seeds.gpu[slots_R]
        self.sampling.temperature_R[:rows] = states.temperature.gpu[slots_R]
        self.sampling.top_k_R[:rows] = states.top_k.gpu[slots_R]
        self.sampling.top_p_R[:rows] = states.top_p.gpu[slots_R]
        self.sampling.min_p_R[:rows] = states.min_p.gpu[slots_R]
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
            positions_RD: position of the row that draws the token of each depth, int64.
            ids_RDP: candidates, int64.
        """
        if self._greedy:
            return None
        rows = ids_RDP.shape[0]
        noise_RDP = keyed_gumbel(self.seeds[:rows], positions_RD, ids_RDP, use_fp64=self.use_fp64)
        return SharedNoise(noise_RDP, self.sampling.first(rows))
