# SPDX-License-Identifier: Apache-2.0
"""Engines that the tests of this folder share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).parent))

from running import Engine, Plain, TreeEngine

TARGETS = ("dense", "hybrid")


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Name of the target, which runs through all of them."""
    return request.param


@pytest.fixture(scope="session")
def plain_of(tiny_models: dict[str, Path]) -> Callable[..., Plain]:
    """Plain decoding by target and options, started when first asked for."""
    started: dict[str, Plain] = {}

    def get(name: str, **options: Any) -> Plain:
        key = f"{name} {sorted(options.items())}"
        if key not in started:
            started[key] = Plain(Engine(tiny_models[name], max_num_seqs=8, **options))
        return started[key]

    return get


@pytest.fixture(scope="session")
def plain(plain_of: Callable[..., Plain], target: str) -> Plain:
    """Plain decoding of the target."""
    return plain_of(target)


@pytest.fixture(scope="session")
def trees_of(tiny_models: dict[str, Path]) -> Callable[..., TreeEngine]:
    """Tree engines by target and options, started when first asked for."""
    started: dict[str, TreeEngine] = {}

    def get(name: str, **options: Any) -> TreeEngine:
        key = f"{name} {sorted(options.items())}"
        if key not in started:
            started[key] = TreeEngine(tiny_models, name, **options)
        engine = started[key]
        engine.oracle.reset()
        engine.stats()
        return engine

    return get


@pytest.fixture
def trees(trees_of: Callable[..., TreeEngine], target: str) -> TreeEngine:
    """The shared tree engine of the target: budget 12, drafter of depth 7, no prefix caching."""
    return trees_of(target)


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache blocks whose layers lie side by side, for engines that a test starts.

    A CPU's attention kernels read them as well, though vLLM does not list the layout for them; here
    they say so, which makes a CPU run what a GPU runs.
    """
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_weaver.engine.attention_cpu import TreeCPUAttentionBackend

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    monkeypatch.setattr(
        TreeCPUAttentionBackend, "supported_kv_cache_layouts", classmethod(lambda cls: layouts)
    )
    monkeypatch.setattr("vllm_weaver.engine.blocks.requested_layout", lambda: "BLHNC")
