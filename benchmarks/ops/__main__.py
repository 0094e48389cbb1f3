# SPDX-License-Identifier: Apache-2.0
"""Checks, then times the kernels on a lent GPU: one command for a short lease.

    python -m benchmarks.ops --out DIR [--minutes 8] [--parts build,tests,sanitize,gdn,...]

Parts run one after another, each in a process with a limit of its own, in the order of the list;
what does not fit into the minutes is said and left out. DIR gets each part's JSON, `summary.json`
and all output in `logs.tgz`: few files, since a lease returns few.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ops.machine import machine

PYTHON = sys.executable
TESTS = (
    *(
        "tests/ops/test_gdn_cuda.py",
        "tests/ops/test_gdn_delayed.py",
        "tests/ops/test_gdn_triton.py",
    ),
    *("tests/ops/test_conv_triton.py", "tests/ops/test_attention.py", "tests/ops/test_compact.py"),
    *("tests/ops/test_attention_tail.py", "tests/ops/test_attention_fp8.py"),
    *("tests/ops/test_gather.py", "tests/ops/test_accept_paths.py", "tests/ops/test_noise.py"),
    *("tests/ops/test_prepare_step.py", "tests/ops/test_pool.py", "tests/ops/test_propose.py"),
    *("tests/tree", "tests/adapter/test_weave.py"),
)


@dataclass(frozen=True)
class Part:
    """A command, the seconds that it may take, and the lines of its output worth a look."""

    command: tuple[str, ...]
    seconds: float
    lines: int = 12


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a module.

    {out} stands for the part's JSON file, {workers} for the number of processes that run tests.
    """
    return (PYTHON, "-m", name, *arguments)


def watched(tool: str) -> tuple[str, ...]:
    """Every kernel once, small, under one of compute-sanitizer's tools."""
    once = module("benchmarks.ops.once", "--small")
    return ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *once)


BENCH = "benchmarks.ops."
PARTS: Mapping[str, Part] = {
    "build": Part(module("vllm_weaver.ops.cuda.build", "full"), 150, 3),
    "tests": Part(
        module(
            *("pytest", "-q", "-n", "{workers}", "--timeout", "60", "--tb=short", "-rsfE"),
            *("-p", "no:cacheprovider"),
        )
        + TESTS,
        240,
        40,
    ),
    "memcheck": Part(watched("memcheck"), 90),
    "racecheck": Part(watched("racecheck"), 90, 60),
    "step": Part(module(BENCH + "step", "--quick", "--out", "{out}"), 60, 30),
    "noise": Part(module(BENCH + "noise", "--quick", "--out", "{out}"), 60, 4),
    "top_p": Part(module(BENCH + "top_p", "--out", "{out}"), 90, 20),
    "propose": Part(module(BENCH + "propose", "--out", "{out}"), 60, 30),
    "weave": Part(module(BENCH + "weave", "--quick", "--out", "{out}"), 90, 40),
    "commit": Part(module(BENCH + "gdn_commit", "--batches", "1,16", "--out", "{out}"), 90, 40),
    "attention": Part(module(BENCH + "attention", "--fp8", "--out", "{out}"), 120, 40),
    "gdn": Part(module(BENCH + "gdn", "--cuda", "--out", "{out}"), 150, 60),
    "chain": Part(module(BENCH + "gdn_chain", "--out", "{out}"), 90, 40),
    "ncu": Part(
        (
            *("ncu", "--clock-control", "none", "--launch-count", "40"),
            *("-k", "regex:tree_verify|tree_conv|commit|tree_attention|tail|linear|score_and_grow"),
            *module("benchmarks.ops.once", "--requests", "1"),
        ),
        120,
        60,
    ),
}


def run(name: str, part: Part, folder: Path, seconds: float, workers: int) -> dict[str, Any]:
    """Run a part and say how it ended; its output goes to `folder`/logs and its end is printed."""
    log = folder / "logs" / f"{name}.log"
    places = {"out": folder / f"{name}.json", "workers": workers}
    command = [word.format(**places) for word in part.command]
    started = time.perf_counter()
    status: int | str
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=min(seconds, part.seconds),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = "out of time"
        except OSError as error:
            status = str(error)
    ended = {"status": status, "seconds": round(time.perf_counter() - started, 1)}
    print(f"== {name}: {status} after {ended['seconds']} s", flush=True)
    print("\n".join(log.read_text(errors="replace").splitlines()[-part.lines :]), flush=True)
    return ended


def run_all(parts: Sequence[str], folder: Path, minutes: float, workers: int = 2) -> dict[str, Any]:
    """Run parts while there is time; write the summary and pack the output."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    until = time.perf_counter() + 60 * minutes
    summary: dict[str, Any] = {**machine(), "parts": {}}
    for name in parts:
        left = until - time.perf_counter()
        if left < 5:
            summary["parts"][name] = {"status": "no time left"}
            print(f"== {name}: no time left", flush=True)
        else:
            summary["parts"][name] = run(name, PARTS[name], folder, left, workers)
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    with tarfile.open(folder / "logs.tgz", "w:gz") as archive:
        archive.add(folder / "logs", "logs")
    return summary


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=14, help="processes that run tests")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    args = parser.parse_args()
    parts = args.parts.split(",")
    for name in parts:
        if name not in PARTS:
            parser.error(f"no part {name!r}: choose of {', '.join(PARTS)}")
    summary = run_all(parts, args.out, args.minutes, args.workers)
    failed = [name for name, ended in summary["parts"].items() if ended["status"] != 0]
    if failed:
        raise SystemExit(f"not done or not right: {', '.join(failed)}")


if __name__ == "__main__":
    main()
