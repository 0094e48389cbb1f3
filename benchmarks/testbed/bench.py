# SPDX-License-Identifier: Apache-2.0
"""The `bench` testbed in one command: corpus, target, drafter, adapter, measurements.

    python -m benchmarks.testbed.bench --corpus FILE --state DIR --out DIR --minutes 9
    python -m benchmarks.testbed.bench --state DIR --out DIR --stages variants --minutes 6

Stages: `train` (target, DFlash drafter, adapter), then `measure` and `variants` (`ablate.py`), each
a process of its own with the time that is left. `--state` holds models, corpus and rollouts, and is
what a later call goes on from: models that are there are not trained again. `--out` receives small
files alone: the record of every stage, its log, and `--send`ed models in pieces (`pack.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import pack
from .config import SIZES

STAGES = ("train", "measure", "variants")
_PARTS = {"measure": ("main", "arms"), "variants": ("variants",)}
# Seconds that a later stage is left when an earlier one is given its time.
_AFTER = {"measure": 90.0, "variants": 150.0}
# Seconds of a training process before its clock starts and after it stops: imports, and memory that
# is given back.
_AROUND_TRAINING_S = 13.0
_GRACE = 20.0


class Bench:
    """One call: its clock, its directories and what its stages returned."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.started = time.time()
        self.end = self.started + 60 * given.minutes
        self.size: str = given.size
        self.seed: int = given.seed
        self.state: Path = given.state
        self.out: Path = given.out
        self.limit: float | None = given.target_seconds
        self.failed: list[str] = []
        self.state.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        print(f"[bench {time.time() - self.started:6.1f}s] {text}", flush=True)

    def left(self) -> float:
        return self.end - time.time()

    def results(self, stage: str) -> Path:
        name = "results.json" if stage == "train" else f"{stage}-{self.size}.json"
        return self.state / name

    def module(self, name: str, seconds: float, *arguments: object) -> bool:
        """Run a module of this package for at most so many seconds; its log goes to `--out`."""
        command = [sys.executable, "-m", f"benchmarks.testbed.{name}", *map(str, arguments)]
        self.log(" ".join(command[1:]))
        # One file for all stages: a machine may hand back few.
        file = self.out / "bench.log"
        before = file.stat().st_size if file.exists() else 0
        with open(file, "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                # Its own processes too: rollouts and corpus are children of it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = -signal.SIGKILL
        lines = file.read_bytes()[before:].decode(errors="replace").splitlines()
        for line in lines[-(6 if status == 0 else 40) :]:
            print(f"    {line[:400]}", flush=True)
        self.log(f"{name}: status {status}")
        return status == 0

    def train(self, later: Sequence[str]) -> bool:
        seconds = self.left() - sum(_AFTER[stage] for stage in later)
        within = seconds - _AROUND_TRAINING_S
        limit = self.limit or SIZES[self.size].shares.target * within
        stages = [n for n in ("target", "drafter", "adapter") if not self.has(n)]
        if not stages:
            return True
        arguments: list[object] = ["--size", self.size, "--seed", self.seed, "--out", self.state]
        arguments += ["--stages", ",".join(stages), "--within", round(within)]
        if "target" in stages:
            arguments += ["--limits", f"target={limit:.0f}"]
        else:
            arguments += ["--from", self.state]
        return self.module("train", seconds + _GRACE, *arguments)

    def has(self, model: str) -> bool:
        return (self.state / model / "model.safetensors").is_file()

    def measure(self, stage: str, later: Sequence[str], *more: object) -> bool:
        seconds = self.left() - sum(_AFTER[name] for name in later)
        parts = ",".join(_PARTS[stage])
        arguments: list[object] = [self.state, "--size", self.size, "--parts", parts]
        arguments += ["--out", self.results(stage), "--minutes", round(seconds / 60, 2)]
        arguments += ["--seed", self.seed, *more]
        return self.module("ablate", seconds + _GRACE, *arguments)

    def keep(self, stage: str) -> None:
        """Copy a stage's record, which may be that of a part of it."""
        file = self.results(stage)
        if file.is_file():
            name = "train.json" if stage == "train" else file.name
            shutil.copy(file, self.out / name)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": round(time.time() - self.started, 1)}
        found["failed"] = self.failed
        for stage in STAGES:
            file = self.results(stage)
            if not file.is_file():
                continue
            record = json.loads(file.read_text(encoding="utf-8"))
            if stage == "train":
                found[stage] = {
                    name: {k: part.get(k) for k in ("steps", "seconds", "parameters")}
                    for name, part in record["stages"].items()
                    if part
                }
            elif stage == "variants":
                found[stage] = {
                    name: {
                        key: case["arms"]["weaver B=63"]["value"]
                        for key, case in variant.items()
                        if isinstance(case, dict) and "arms" in case
                    }
                    for name, variant in record.get("variants", {}).get("found", {}).items()
                }
            else:
                for kind in _PARTS[stage]:
                    found[kind] = {
                        case: {k: v["value"] for k, v in part["arms"].items()}
                        for case, part in record.get(kind, {}).items()
                    }
            if record.get("left_out"):
                found[f"{stage}, left out"] = record["left_out"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="bench")
    parser.add_argument("--corpus", type=Path, help="file of `pack corpus`; else built here")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    parser.add_argument("--target-seconds", type=float, help="most of the target's training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--send", default="", help="models to cut into pieces in --out: adapter,..."
    )
    parser.add_argument("--first-piece", type=int, default=0)
    parser.add_argument("--most-pieces", type=int, default=4)
    parser.add_argument("--ablate", default="", help="more arguments of `ablate`, in one string")
    given = parser.parse_args()
    bench = Bench(given)
    chosen = [name for name in STAGES if name in given.stages.split(",")]
    if given.corpus is not None and not (bench.state / "work" / "corpus.json").is_file():
        pack.unpack_corpus(given.corpus, bench.state / "work")
        bench.log("corpus unpacked")
    for place, stage in enumerate(chosen):
        later = chosen[place + 1 :]
        if stage == "train":
            good = bench.train(later)
        else:
            good = bench.measure(stage, later, *given.ablate.split())
        if not good:
            bench.failed.append(stage)
        bench.keep(stage)
        # Written after each stage: what is there survives a call that is cut off.
        (bench.out / "summary.json").write_text(json.dumps(bench.summary(), indent=1) + "\n")
        if stage == "train" and not all(map(bench.has, ("target", "drafter", "adapter"))):
            bench.log("models are missing: nothing to measure")
            break
    if given.send:
        models = [bench.state / name for name in given.send.split(",")]
        written, count = pack.split(bench.out, models, given.first_piece, given.most_pieces)
        bench.log(f"{written} of {count} pieces, from {given.first_piece} on")
    print(json.dumps(bench.summary(), indent=1))
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
