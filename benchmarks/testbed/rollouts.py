# SPDX-License-Identifier: Apache-2.0
"""The target's own text, for drafter and adapter to learn from: a process of its own.

    python -m benchmarks.testbed.rollouts WORK --size nano --target DIR --seed 0

Rows start with source text of WORK's corpus (which this waits for) and the target continues them,
half greedily and half at temperature 1. Writes WORK/rollouts<group>.npz. Runs while the trainer
compiles its kernels, and compiles its own while it waits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import export
from .config import SIZES, Group
from .states import Rows
from .target import RUNTIME, Target

_BATCH = 6144


def windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """[rows, length]: random windows of a stream of tokens."""
    starts = torch.randint(len(stream) - length, (rows,), device=stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)].long()


def batch_of(group: Group, sets: int) -> tuple[int, int]:
    """Rows that are written at once, and how often, for each prefix of `1 + sets` sets of rows."""
    each = (1 + sets) * (group.rows // len(group.prefixes))
    times = -(-each // _BATCH)
    return each // times, times


def generate(target: Target, stream: Tensor, group: Group, sets: int = 0) -> tuple[Tensor, Tensor]:
    """(ids [rows, length], start [rows]) of the target's own text, in `1 + sets` sets of the
    group's rows; rows of one prefix stand together."""
    batch, times = batch_of(group, sets)
    sampled = torch.arange(batch, device=stream.device) % 2 == 1
    ids, start = [], []
    for prefix in group.prefixes:
        for _ in range(times):
            ids.append(target.generate(windows(stream, batch, prefix), group.length, sampled).int())
            start += [prefix] * batch
    return torch.cat(ids), torch.tensor(start, device=stream.device)


def load(file: Path, group: Group, share: float, device: torch.device | str) -> tuple[Rows, Rows]:
    """A share of the group's rows from a file of `generate`, and as large a share of the further
    sets' rows, which may be none."""
    with np.load(file) as own:
        ids, start = (
            torch.from_numpy(own[k].astype(np.int32)).to(device) for k in ("ids", "start")
        )
    count = len(group.prefixes)
    ids, start = ids.view(count, -1, ids.shape[1]), start.view(count, -1)
    first = group.rows // count
    step = max(1, round(1 / share))

    def rows(part: slice) -> Rows:
        # In pairs, since every other row is sampled.
        pick = torch.arange(ids.shape[1], device=ids.device)[part]
        pick = pick[pick // 2 % step == 0]
        return Rows(ids[:, pick].flatten(0, 1), start[:, pick].flatten())

    return rows(slice(first)), rows(slice(first, None))


def wait_for(file: Path, seconds: float) -> None:
    deadline = time.time() + seconds
    while not file.exists():
        if time.time() > deadline:
            raise TimeoutError(f"{file} did not appear within {seconds:.0f} s")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="nano")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size, began = SIZES[arguments.size], time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        RUNTIME.dtype = torch.bfloat16
        RUNTIME.compiled_steps = True
        torch.set_float32_matmul_precision("high")
        # Whatever does not compile runs as it is: slower, and worth having.
        torch._dynamo.config.suppress_errors = True
    target = export.load_target(arguments.target, size.target, device)
    if device == "cuda":
        batch, _ = batch_of(size.groups[0], size.regular.sets)
        prefix = torch.randint(2, size.target.vocab, (batch, 16), device=device)
        target.generate(prefix, 20, torch.arange(batch, device=device) % 2 == 1)
        torch.cuda.synchronize()
        print(f"rollouts: ready after {time.time() - began:.1f} s", flush=True)
    wait_for(arguments.work / "corpus.json", 300)
    stream = torch.from_numpy(np.load(arguments.work / "train.npy").astype(np.int32)).to(device)
    torch.manual_seed(arguments.seed + 1)
    for i, group in enumerate(size.groups):
        if not group.rows:
            continue
        ids, start = generate(target, stream, group, size.regular.sets)
        np.savez(
            arguments.work / f"rollouts{i}.npz",
            ids=ids.cpu().numpy().astype(np.uint16),
            start=start.cpu().numpy(),
        )
        print(f"rollouts: {tuple(ids.shape)} after {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
