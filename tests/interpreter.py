# SPDX-License-Identifier: Apache-2.0
"""Where Triton kernels run in this process, and how a file's tests run where they are interpreted.

Triton decides when it is imported whether it compiles or interprets, so the tests of kernels that
need a GPU here run once more in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
needs_kernel = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1 set before import"
)
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
runs_elsewhere = pytest.mark.skipif(
    INTERPRETED or CUDA, reason="the kernels' tests run in this process"
)


def assert_passes_interpreted(file: str) -> None:
    """Run every test of ``file`` in a process that interprets the kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
