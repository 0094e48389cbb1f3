# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Muon for matrices that are held in shards: each is made whole in one process.

Muon's iteration multiplies whole matrices. On shards these would be products with sums split over
processes, rounded to bfloat16 between; here process i mod N gathers the gradient of matrix i, steps
it as a run of one process does, and gives the result to all. So each iteration runs once, in one
place, and momenta and work are spread over the processes by matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vllm_weaver.train.parallel import like

_MOMENTUM = "momentum_buffer"


class ShardedMuon:
    """What `torch.optim.Muon` is to whole parameters; its state has that optimiser's form.

    Args: `shards`, the parameters; `settings` of `torch.optim.Muon`. All processes make it, and
    call each of its methods, together.
    """

    def __init__(self, shards: Sequence[nn.Parameter], **settings: Any) -> None:
        self._shards = list(shards)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # Masters of the matrices that this process steps; elsewhere only their place.
        self._whole: list[nn.Parameter] = []
        for number, shard in enumerate(self._shards):
            assert isinstance(shard, DTensor)
            full = shard.full_tensor()
            self._whole.append(nn.Parameter(full if self._mine(number) else full[:0]))
        # Only matrices of this process ever have a gradient, and Muon passes over the others.
        self._muon = torch.optim.Muon(self._whole, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As an optimiser's: learning rates are set here."""
        return self._muon.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Step all matrices by the gradients of their shards."""
        for number, shard in enumerate(self._shards):
            assert isinstance(shard.grad, DTensor)
            gradient = shard.grad.full_tensor()
            if self._mine(number):
                self._whole[number].grad = gradient
        self._muon.step()
        for number, shard in enumerate(self._shards):
            shard.copy_(like(self._from_owner(number, self._whole[number].data), shard))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the shards."""
        self._muon.zero_grad(set_to_none)
        for shard in self._shards:
            shard.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of a `torch.optim.Muon` over the whole matrices, in every process."""
        given = self._muon.state_dict()
        # Whether a step was made is the same everywhere, but only owners have state to show it.
        stepped = torch.tensor(float(bool(given["state"])), device=self._whole[0].device)
        dist.all_reduce(stepped, dist.ReduceOp.MAX)
        state = {}
        for number in range(len(self._shards)) if stepped > 0 else ():
            matrix = self._whole[number]
            held = self._muon.state[matrix][_MOMENTUM] if self._mine(number) else matrix.data
            state[number] = {_MOMENTUM: self._from_owner(number, held)}
        return {**given, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`; call it after the parameters were loaded."""
        held = {number: kept for number, kept in state["state"].items() if self._mine(number)}
        self._muon.load_state_dict({**state, "state": held})
        for number, shard in enumerate(self._shards):
            assert isinstance(shard, DTensor)
            full = shard.full_tensor()
            if self._mine(number):
                self._whole[number].data.copy_(full)

    def _mine(self, number: int) -> bool:
        return number % self._world == self._rank

    def _from_owner(self, number: int, tensor: Tensor) -> Tensor:
        shape = self._shards[number].shape
        full = tensor.contiguous() if self._mine(number) else tensor.new_empty(shape)
        dist.broadcast(full, number % self._world)
        return full
