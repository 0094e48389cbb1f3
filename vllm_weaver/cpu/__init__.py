# SPDX-License-Identifier: Apache-2.0
"""Running on a machine without a GPU: vLLM's Model Runner V2 under Triton's interpreter.

vLLM serves trees only with Model Runner V2, and that only where Triton has a ``cpu`` backend.
This package brings one that interprets every kernel. It is opt-in: its entry point lies in a
directory of its own (:data:`SITE`), which must be on ``PYTHONPATH`` before Triton is imported, so
that an installed vllm-weaver changes nothing for anybody else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = Path(__file__).parent / "site"


def environment() -> dict[str, str]:
    """Variables that a process and its children need, ``PYTHONPATH`` included."""
    paths = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def enable() -> None:
    """Switch this process, and those it starts, to the interpreter.

    Raises:
        RuntimeError: Triton or vLLM is already imported, so it is too late.
    """
    late = [name for name in ("triton", "vllm") if name in sys.modules]
    if late and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"call vllm_weaver.cpu.enable() before importing {' or '.join(late)}")
    os.environ.update(environment())
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
