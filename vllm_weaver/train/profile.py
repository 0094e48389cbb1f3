# SPDX-License-Identifier: Apache-2.0
"""Where a training step's time goes: shares of matrix products and of everything else.

Knows a trainer and PyTorch's profiler; writes nothing but a trace, where one is asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vllm_weaver.train.card import versions
from vllm_weaver.train.errors import SaveError, TrainError, first_line
from vllm_weaver.train.trainer import Trainer

WARM_STEPS, STEPS = 2, 4
GEMMS = "matrix products"
# The first that matches an operator's name counts. Times are an operator's own, without those of
# the operators inside it, so that they add up.
_GROUPS = (
    (GEMMS, r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|mv|addmv|dot)$|^triton_tem"),
    ("attention", r"attention|flash|fmha|cudnn_sdpa"),
    ("top-k and sorting", r"topk|sort|kthvalue"),
    ("softmax and losses", r"softmax|logsumexp|xlogy|nll"),
    ("between processes", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast"),
    ("gather, scatter, index", r"gather|scatter|index|embedding|take|masked_fill"),
    ("copies and casts", r"copy|memcpy|memset|_to_copy|aten::(to|cat|contiguous|fill_|zero_)$"),
    ("reading data", r"DataLoader"),
)
_OTHER = "elementwise and the rest"
_OPTIMISERS = re.compile(r"Optimizer\.step#(\w+)\.step")
_MICROSECONDS = 1e6


def profile(trainer: Trainer, trace: Path | None = None) -> dict[str, Any]:
    """Run a few steps without saving and say where their time went.

    Returns plain data: seconds per step, and `groups` and `operators` with the share of the
    device's busy time (of operators on a CPU) and the share of the steps' whole time; both are of
    rank 0. With `trace`, a Chrome trace is written there.

    Raises:
        TrainError: the run has too few steps, or as training would; the trace cannot be written.
    """
    needed = WARM_STEPS + STEPS
    if trainer.plan.steps < needed:
        raise TrainError(
            f"the run has {trainer.plan.steps} steps, profiling takes {needed}: raise train.epochs "
            "or train.steps, or prepare more data"
        )
    cuda = trainer.processes.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    steps = trainer.steps()
    for _ in range(WARM_STEPS):
        next(steps)
    with torch.profiler.profile(activities=activities) as profiler:
        _wait(cuda)
        started = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        _wait(cuda)
        seconds = time.perf_counter() - started
    if trace is not None and trainer.processes.first:
        try:
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise SaveError(f"{trace}: could not be written ({first_line(error)})") from error
    return {
        "kind": "profile",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "processes": trainer.processes.world,
        "steps": STEPS,
        "seconds_per_step": seconds / STEPS,
        **shares(profiler.key_averages(), seconds, cuda),
        "compile": trainer.recipe.train.compile,
        "precision": trainer.recipe.train.precision,
        "versions": versions(),
    }


def shares(events: Iterable[Any], seconds: float, cuda: bool, most: int = 12) -> dict[str, Any]:
    """Group a profile's averages: those of operators, whose kernels count as theirs.

    `seconds` is the wall time that the profile covers. Returns `busy_seconds`, `groups`,
    `operators` (the `most` longest), and `optimisers`: time inside each one's step, its products
    included.
    """
    own: dict[str, float] = {}
    optimisers: dict[str, float] = {}
    for event in events:
        # Kernels are listed too, and would count twice.
        if event.device_type.name != "CPU":
            continue
        step = _OPTIMISERS.fullmatch(event.key)
        if step:
            total = event.device_time_total if cuda else event.cpu_time_total
            optimisers[step[1]] = optimisers.get(step[1], 0.0) + total / _MICROSECONDS
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            own[event.key] = own.get(event.key, 0.0) + spent / _MICROSECONDS
    busy = sum(own.values())
    groups: dict[str, float] = {}
    for name, spent in own.items():
        group = group_of(name)
        groups[group] = groups.get(group, 0.0) + spent

    def table(times: dict[str, float], count: int | None = None) -> dict[str, dict[str, float]]:
        longest = sorted(times.items(), key=lambda item: -item[1])[:count]
        return {
            name: {
                "seconds": round(spent, 6),
                "of_busy": round(spent / busy, 4) if busy else 0.0,
                "of_wall": round(spent / seconds, 4),
            }
            for name, spent in longest
        }

    return {
        "busy_seconds": round(busy, 6),
        "groups": table(groups),
        "operators": table(own, most),
        "optimisers": table(optimisers),
    }


def group_of(operator: str) -> str:
    """The group that an operator's time is counted in."""
    for group, pattern in _GROUPS:
        if re.search(pattern, operator, re.IGNORECASE):
            return group
    return _OTHER


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
