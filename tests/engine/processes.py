# SPDX-License-Identifier: Apache-2.0
"""Processes of their own: one that generates, and a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def environment(**values: str) -> dict[str, str]:
    """This process's environment, with the engine in a process of its own or not."""
    return {**os.environ, "PYTHONWARNINGS": "ignore", **values}


def generate(request: dict[str, Any], timeout: int = 900, **values: str) -> dict[str, Any]:
    """Run ``generate.py``.

    Args:
        request: see there.
        timeout: in seconds.
        values: environment variables.

    Raises:
        AssertionError: the process failed; holds the end of what it wrote.
    """
    result = subprocess.run(
        [sys.executable, str(HERE / "generate.py")],
        input=json.dumps(request),
        env=environment(**values),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    lines = result.stdout.splitlines()
    (answer,) = [line for line in lines if line.startswith("ANSWER ")]
    return json.loads(answer.removeprefix("ANSWER "))
