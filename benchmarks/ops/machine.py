# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of kernels ran with, and whether its results are right: for every report."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import torch
import triton


def machine() -> dict[str, Any]:
    """Command, commit, GPU with driver and clocks (None without one), and versions."""
    gpu = torch.cuda.is_available()
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    return {
        "command": " ".join(sys.argv),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "device": torch.cuda.get_device_name() if gpu else "interpreter",
        "driver_and_clocks": output_of("nvidia-smi", query, "--format=csv,noheader")
        if gpu
        else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }


class Checks:
    """Named checks; `failed` lists those that did not hold."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def note(self, name: str, value: Any, holds: bool, optional: bool = False) -> bool:
        """Keep and print a check's value; one that is `optional` may fail. Returns `holds`."""
        self.results[name] = value
        print(f"check {name}: {value}{'' if holds else '  FAILED'}", flush=True)
        if not holds and not optional:
            self.failed.append(name)
        return holds


def output_of(*command: str) -> str | None:
    """What a command prints, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def start_again_interpreted(module: str) -> None:
    """Replace this process by one that runs `module` in Triton's interpreter, unless it does.

    Triton reads the variable when it is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
