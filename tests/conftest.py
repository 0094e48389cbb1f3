# SPDX-License-Identifier: Apache-2.0
"""Shared set-up: without a GPU, vLLM's Model Runner V2 runs under Triton's interpreter."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    TOKENIZERS_PARALLELISM="false",
)
if not torch.cuda.is_available():
    import vllm_weaver.cpu

    vllm_weaver.cpu.enable()
    # Skip vLLM's CPU warm-up pass: it tunes nothing when kernels are interpreted.
    os.environ["VLLM_CPU_CI_ENV"] = "1"


def pytest_collection_finish() -> None:
    """What is there now, a million objects of modules, stays: no collection need look at it.

    vLLM collects garbage a dozen times as it starts an engine.
    """
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random-weight targets, drafters and adapters (see ``tests/models.py``)."""
    from models import make_models

    return make_models(tmp_path_factory.mktemp("models"))
