# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices, AdamW for the rest, a warm-up / stable / decay schedule, and a step loop.

Knows nothing of the models. Parameters may be bfloat16: the optimiser then keeps float32 masters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .config import Stage

_MOMENTUM = 0.95
_MUON_DECAY = 0.02
# Coefficients of Newton-Schulz steps that push singular values towards 1 (Muon's quintic).
_QUINTIC = (3.4445, -4.7750, 2.0315)


def _orthogonalise(x: Tensor) -> Tensor:
    """Replace the singular values of each matrix of x [n, rows, columns] by about 1."""
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16) if x.is_cuda else x
    a, b, c = _QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if wide else x).float()


class Optimiser:
    """One step of Muon and AdamW together; `adam` names parameters that Muon must not take."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        stage: Stage,
        adam: tuple[str, ...] = (),
        adam_decay: float = 0.0,
        muon_decay: float = _MUON_DECAY,
    ) -> None:
        self.stage, self._muon_decay = stage, muon_decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        rest = []
        for name, parameter in named:
            matrix = parameter.dim() == 2 and min(parameter.shape) > 8
            if matrix and not any(word in name for word in adam):
                groups.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                rest.append(parameter)
        self._groups = list(groups.values())
        self._masters = [torch.stack([p.detach().float() for p in ps]) for ps in self._groups]
        self._momenta = [torch.zeros_like(m) for m in self._masters]
        self._rest = rest
        self._rest_masters = [p.detach().float().clone().requires_grad_() for p in rest]
        self._adam = torch.optim.AdamW(
            self._rest_masters,
            lr=stage.adam_lr,
            betas=(0.9, 0.95),
            weight_decay=adam_decay,
            fused=bool(rest) and rest[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` times the peak learning rates, and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = self.stage.adam_lr * factor
        for master, parameter in zip(self._rest_masters, self._rest, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._adam.step()
        torch._foreach_copy_([*self._rest], [*self._rest_masters])
        rate = self.stage.muon_lr * factor
        for parameters, masters, momentum in zip(
            self._groups, self._masters, self._momenta, strict=True
        ):
            gradient = torch.stack([p.grad.float() for p in parameters if p.grad is not None])
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = _orthogonalise(gradient.lerp(momentum, _MOMENTUM))
            rows, columns = masters.shape[1:]
            masters.mul_(1 - self._muon_decay * rate)
            masters.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            torch._foreach_copy_([*parameters], [*masters.unbind()])
        for parameter in [*self._rest, *(p for ps in self._groups for p in ps)]:
            parameter.grad = None


def schedule(stage: Stage, progress: float) -> float:
    """Factor on the learning rates: linear warm-up, constant, linear decay to zero."""
    if progress < stage.warmup:
        return 0.02 + 0.98 * progress / stage.warmup
    return min(1.0, max(0.0, (1 - progress) / stage.decay))


def train(
    name: str,
    stage: Stage,
    optimiser: Optimiser,
    loss_of: Callable[[float], tuple[Tensor, dict[str, Tensor]]],
    *,
    seconds: float | None = None,
    log: Callable[[str], None] = print,
    after_step: Callable[[], None] | None = None,
    measure: Callable[[], dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Run a stage; `loss_of(progress)` gives the loss and what to log beside it.

    With `seconds` given, a stage that would run past it is shortened after its first twentieth, and
    the record says so. Until its rates begin to fall it is planned anew at every twentieth, since
    others may use the device for a part of the time. `measure` is asked about 20 times, the last
    time at the end; its answers are the record's `held_out`. Raises FloatingPointError on a loss
    that is not finite.
    """
    start = time.time()
    steps, step, history, shown = stage.steps, 0, [], start
    measure_at = max(12, stage.steps // 20)
    held_out: list[dict[str, Any]] = []
    began, counted = start, 0
    while step < steps:
        progress = step / steps
        loss, extra = loss_of(progress)
        loss.backward()
        optimiser.step(schedule(stage, progress))
        step += 1
        if after_step is not None:
            after_step()
        if step == 10:
            float(
                loss.detach()
            )  # waits for the device, so that the clock starts after the slow first steps
            began, counted = time.time(), step
        if (
            seconds is not None
            and step % measure_at == 0
            and (step == measure_at or step < (1 - stage.decay) * steps)
        ):
            float(loss.detach())
            now = time.time()
            per_step = (now - began) / max(1, step - counted)
            began, counted = now, step
            steps = max(step, min(stage.steps, step + int((seconds - (now - start)) / per_step)))
        if step % 50 == 0 or step in (1, steps):
            value = float(loss.detach())
            if not math.isfinite(value):
                raise FloatingPointError(f"{name}: the loss is {value} at step {step}")
            record = {"step": step, "loss": round(value, 4)}
            record |= {k: _rounded(v) for k, v in extra.items()}
            history.append(record)
            if time.time() - shown > 8 or step in (1, steps):
                shown = time.time()
                log(f"{name}: {1e3 * (shown - start) / step:.0f} ms/step {record}")
        if measure is not None and (step % measure_at == 0 or step == steps):
            held_out.append({"step": step, **{k: _rounded(v) for k, v in measure().items()}})
            if step == steps:
                log(f"{name}: held out {held_out[-1]}")
    result = {
        "steps": step,
        "planned_steps": stage.steps,
        "seconds": round(time.time() - start, 1),
        "history": history,
    }
    return result | ({"held_out": held_out} if measure is not None else {})


def _rounded(value: Tensor) -> Any:
    values = value.detach().float().cpu()
    return [round(v, 3) for v in values.tolist()] if values.dim() else round(float(values), 4)
