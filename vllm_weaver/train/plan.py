# SPDX-License-Identifier: Apache-2.0
"""What a run would cost: sizes, memory and time per step, from a few steps that are thrown away.

Knows a trainer; writes nothing.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from vllm_weaver.train.processes import host_memory, host_peak
from vllm_weaver.train.trainer import Trainer

_TIMED_STEPS = 2
# Float32 parameters, gradients, and one (Muon) or two (AdamW) moments.
_BYTES_MATRIX, _BYTES_OTHER = 12, 16


def dry_run(trainer: Trainer) -> dict[str, Any]:
    """Run three steps without saving and report sizes, memory and time.

    Raises TrainError as training would.
    """
    recipe, plan, data = trainer.recipe, trainer.plan, trainer.data
    matrices = sum(p.numel() for p in trainer.adapter.parameters() if p.dim() == 2)
    parameters = sum(p.numel() for p in trainer.adapter.parameters())
    per_step = plan.units * plan.documents
    missing = data.missing(range(len(data)))
    shards = trainer.processes.world if recipe.train.parallel == "fsdp2" else 1
    facts: dict[str, Any] = {
        "target": f"{trainer.target.name}: width {trainer.target.width}, vocabulary "
        f"{trainer.target.vocab:,}, {trainer.target.layers} layers",
        "drafter": f"{trainer.drafter.facts.name}: block {trainer.drafter.facts.block}",
        "layers in the files": data.layout.file_layers,
        "adapter": f"{trainer.adapter.config.variant}, {parameters:,} parameters",
        "rows": f"{len(trainer.training_rows):,} to train on, {len(trainer.held_out_rows):,} held "
        f"out, {missing:,} without hidden states",
        "steps": f"{plan.steps:,} of {per_step} rows x up to {recipe.train.blocks} blocks",
        "frozen models": _size(trainer.target.bytes() + trainer.drafter.bytes()),
        "adapter and optimisers": _size(
            (matrices * _BYTES_MATRIX + (parameters - matrices) * _BYTES_OTHER) // shards
        )
        + (f" in each of {shards} processes" if shards > 1 else ""),
        "logits at once": _size(
            min(2**28, recipe.train.documents * recipe.train.blocks * trainer.depth
                * trainer.target.vocab) * 4
        ),
    }  # fmt: skip
    if trainer.server is not None:
        facts["server for extraction"] = f"{data.recipe.endpoint}, serving {trainer.server}"
    if len(data) > missing:
        first = next(i for i in range(len(data)) if data.file(i).exists())
        facts["a row's file"] = _size(data.file(first).stat().st_size)
    steps = trainer.steps()
    next(steps)
    _wait(trainer)
    started, done = time.perf_counter(), 0
    for _ in range(_TIMED_STEPS):
        if next(steps, None) is None:
            break
        done += 1
    _wait(trainer)
    if done:
        seconds = (time.perf_counter() - started) / done
        facts["time per step"] = f"{seconds:.3g} s, {per_step / seconds:.3g} rows/s"
        facts["whole run"] = f"{seconds * plan.steps / 3600:.2g} h"
    else:
        facts["time per step"] = "not measured: the run has a single step"
    facts["host memory"] = f"{_size(host_memory())} with readers, peak {_size(host_peak())}"
    if trainer.processes.device.type == "cuda":
        facts["device memory, peak"] = _size(torch.cuda.max_memory_allocated())
    return facts


def _wait(trainer: Trainer) -> None:
    if trainer.processes.device.type == "cuda":
        torch.cuda.synchronize()


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}"
