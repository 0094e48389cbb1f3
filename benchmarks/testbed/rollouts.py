# SPDX-License-Identifier: Apache-2.0
"""The target's own text, for drafter and adapter to learn from: a process of its own.

    python -m benchmarks.testbed.rollouts WORK --size nano --target DIR --seed 0

Rows start with source text of WORK's corpus (which this waits for) and the target continues them,
half greedily and half at temperature 1. Writes the drafter's rows of each group, then rows after
held-out source, then the adapter's further sets, each a file that appears whole (`rows_file`), so
that a trainer goes on with the first while the rest is written. With `--target -` it compiles on
random weights and then reads the target's directory from its standard input.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import export
from .config import SIZES, Group, Size
from .states import Rows
from .target import RUNTIME, Target

_BATCH = 6144


def windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """[rows, length]: random windows of a stream of tokens."""
    starts = torch.randint(len(stream) - length, (rows,), device=stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)].long()


def rows_file(work: Path, group: int, which: int = 0) -> Path:
    """Where the rows of a group lie: set 0 is the drafter's, others are further ones."""
    return work / (f"rollouts{group}.npz" if which == 0 else f"rollouts{group}-{which}.npz")


def held_out_file(work: Path) -> Path:
    return work / "rollouts-heldout.npz"


def batch_of(group: Group) -> tuple[int, int]:
    """Rows that are written at once, and how often, for each prefix of a set of rows."""
    each = group.rows // len(group.prefixes)
    times = -(-each // _BATCH)
    return each // times, times


def generate(target: Target, stream: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(ids [rows, length], start [rows]) of the target's own text, one set of the group's rows;
    rows of one prefix stand together."""
    batch, times = batch_of(group)
    sampled = torch.arange(batch, device=stream.device) % 2 == 1
    ids, start = [], []
    for prefix in group.prefixes:
        for _ in range(times):
            ids.append(target.generate(windows(stream, batch, prefix), group.length, sampled).int())
            start += [prefix] * batch
    return torch.cat(ids), torch.tensor(start, device=stream.device)


def generate_held_out(target: Target, stream: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """The same of text after windows of a stream that nothing was trained on: every other row is
    sampled. A few rows, for which no step is compiled."""
    before, RUNTIME.compiled_steps = RUNTIME.compiled_steps, False
    rows = 2 * max(1, size.eval_prompts // 2)
    length = size.eval_context + size.eval_tokens + size.drafter.block
    sampled = torch.arange(rows, device=stream.device) % 2 == 1
    try:
        ids = target.generate(windows(stream, rows, size.eval_context), length, sampled).int()
    finally:
        RUNTIME.compiled_steps = before
    return ids, torch.full((rows,), size.eval_context, device=stream.device)


def save(file: Path, rows: tuple[Tensor, Tensor]) -> None:
    """Write `ids` and `start`; the file appears in one move."""
    partial = file.with_name(f"{file.stem}.partial.npz")
    ids, start = (t.cpu().numpy() for t in rows)
    np.savez(partial, ids=ids.astype(np.uint16), start=start)
    partial.replace(file)


def read(file: Path, device: torch.device | str) -> Rows:
    """The rows of a file of `save`."""
    with np.load(file) as own:
        ids, start = (
            torch.from_numpy(own[k].astype(np.int32)).to(device) for k in ("ids", "start")
        )
    return Rows(ids, start)


def load(file: Path, group: Group, share: float, device: torch.device | str) -> Rows:
    """A share of a set of the group's rows.

    Raises ValueError for a file that does not have one set.
    """
    own = read(file, device)
    if len(own.ids) != group.rows:
        raise ValueError(f"{file} has {len(own.ids)} rows, not {group.rows}: write it anew")
    count = len(group.prefixes)
    ids, start = own.ids.view(count, -1, own.ids.shape[1]), own.start.view(count, -1)
    step = max(1, round(1 / share))
    # In pairs, since every other row is sampled.
    pick = torch.arange(ids.shape[1], device=ids.device)
    pick = pick[pick // 2 % step == 0]
    return Rows(ids[:, pick].flatten(0, 1), start[:, pick].flatten())


def joined(parts: Sequence[Rows]) -> Rows:
    return Rows(torch.cat([p.ids for p in parts]), torch.cat([p.start for p in parts]))


def group_rows(
    size: Size,
    work: Path,
    sets: Sequence[int],
    stream: Tensor,
    device: torch.device | str,
    share: float = 1.0,
) -> list[Rows]:
    """Rows of each group, of these sets (`rows_file`): a share of the target's own text, then as
    large a share of random windows of the stream of source text."""
    found = []
    for i, group in enumerate(size.groups):
        parts = []
        if group.rows:
            parts += [load(rows_file(work, i, which), group, share, device) for which in sets]
        count = max(1, round(group.text_rows * share)) if group.text_rows else 0
        text = windows(stream, len(sets) * count, group.length).int()
        start = torch.full((len(text),), size.drafter.block, device=device)
        found.append(joined([*parts, Rows(text, start.int())]))
    return found


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
    parser.add_argument("--target", required=True, help="its directory, or - to be told it later")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size, work, began = SIZES[arguments.size], arguments.work, time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        RUNTIME.dtype = torch.bfloat16
        RUNTIME.compiled_steps = True
        torch.set_float32_matmul_precision("high")
        # Whatever does not compile runs as it is: slower, and worth having.
        torch._dynamo.config.suppress_errors = True
        batch, _ = batch_of(size.groups[0])
        prefix = torch.randint(2, size.target.vocab, (batch, 16), device=device)
        target = Target(size.target).to(device)
        target.generate(prefix, 20, torch.arange(batch, device=device) % 2 == 1)
        torch.cuda.synchronize()
        # What this took is the trainer's until the target is there.
        del target
        torch.cuda.empty_cache()
        print(f"rollouts: ready after {time.time() - began:.1f} s", flush=True)
    given = arguments.target if arguments.target != "-" else sys.stdin.readline().strip()
    if not given:
        sys.exit("rollouts: no target came")
    began = time.time()
    target = export.load_target(Path(given), size.target, device)
    wait_for(work / "corpus.json", 300)
    stream, held_out = (
        torch.from_numpy(np.load(work / f"{name}.npy").astype(np.int32)).to(device)
        for name in ("train", "heldout")
    )
    torch.manual_seed(arguments.seed + 1)
    for which in range(1 + size.regular.sets):
        for i, group in enumerate(size.groups):
            if not group.rows:
                continue
            ids, start = generate(target, stream, group)
            save(rows_file(work, i, which), (ids, start))
            seconds = time.time() - began
            print(f"rollouts: set {which}, {tuple(ids.shape)} after {seconds:.1f} s", flush=True)
        if which == 0:
            save(held_out_file(work), generate_held_out(target, held_out, size))


if __name__ == "__main__":
    main()
