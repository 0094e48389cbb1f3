# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices, AdamW for the rest, and the warm-up / stable / decay schedule.

Knows parameters by name and shape, not what they do. Parameters are float32 masters; lower
precision is the forward pass's business. Both optimisers are PyTorch's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vllm_weaver.train.muon import ShardedMuon
from vllm_weaver.train.parallel import like, norm_of, whole
from vllm_weaver.train.recipe import TrainRecipe

# Positions are rows of a table, not a map between spaces.
_NOT_MATRICES = ("pos_emb",)


class Optimizers:
    """Muon and AdamW stepped together, at `factor` times their peak rates."""

    def __init__(self, model: nn.Module, recipe: TrainRecipe) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2 and min(parameter.shape) > 1
            (matrices if matrix and name not in _NOT_MATRICES else rest).append(parameter)
        self.parameters = [*matrices, *rest]
        self._clip = recipe.clip
        self._peaks = (recipe.muon_lr, recipe.adam_lr)
        in_shards = any(isinstance(p, DTensor) for p in matrices)
        self._parts: tuple[Any, torch.optim.Optimizer] = (
            (ShardedMuon if in_shards else torch.optim.Muon)(
                matrices,
                lr=recipe.muon_lr,
                momentum=recipe.muon_momentum,
                weight_decay=recipe.muon_weight_decay,
                # Updates as large as AdamW's, so that one peak rate can serve both.
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                rest,
                lr=recipe.adam_lr,
                betas=recipe.adam_betas,
                weight_decay=recipe.adam_weight_decay,
            ),
        )

    def step(self, factor: float) -> float:
        """Clip, step and clear the gradients; returns their norm before clipping.

        Raises FloatingPointError, before anything has changed, when it is not finite.
        """
        limit = self._clip if self._clip > 0 else float("inf")
        norm = norm_of(self.parameters, limit)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}")
        for part, peak in zip(self._parts, self._peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """State of both, for a checkpoint: whole tensors. All processes have to ask for it."""
        muon, adam = self._parts
        state: dict[str, Any] = whole({"muon": muon.state_dict(), "adam": adam.state_dict()})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`, into whole parameters or shards."""
        muon, adam = self._parts
        muon.load_state_dict(state["muon"])
        owners = [p for group in adam.param_groups for p in group["params"]]
        moments = {
            index: {
                key: like(value, owners[index]) if isinstance(value, torch.Tensor) else value
                for key, value in held.items()
            }
            for index, held in state["adam"]["state"].items()
        }
        adam.load_state_dict({**state["adam"], "state": moments})


def schedule(step: int, steps: int, warmup: float, decay: float) -> float:
    """Factor on the peak rates in step `step` of `steps`: rise, stay, fall to 0 (all linear)."""
    rising, falling = round(warmup * steps), round(decay * steps)
    if step < rising:
        return (step + 1) / rising
    return 1.0 if step < steps - falling else (steps - step) / (falling + 1)
