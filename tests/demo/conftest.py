# SPDX-License-Identifier: Apache-2.0
"""Random models and two source files in the demo's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")


@pytest.fixture(scope="session")
def demo_models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target``, ``drafter`` and ``adapter``."""
    root = tmp_path_factory.mktemp("demo-models")
    for name, model in (
        ("target", "hybrid"),
        ("drafter", "hybrid-dflash16"),
        ("adapter", "hybrid-weaver16"),
    ):
        (root / name).symlink_to(tiny_models[model], target_is_directory=True)
    return root


@pytest.fixture(scope="session")
def demo_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two source files."""
    root = tmp_path_factory.mktemp("demo-sources")
    (root / "a.py").write_text("# From a test: a.py\nimport os\n\n\nclass Node:\n    value = 1\n")
    (root / "b.py").write_text("def build(tree, budget=63):\n    for node in range(len(tree)):\n")
    return root


@pytest.fixture
def unchanged_environment() -> Iterator[None]:
    """Variables that the demo sets for its process are taken back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
