# SPDX-License-Identifier: Apache-2.0
"""Every target class that is said to be supported, and vLLM's native GDN core in bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
from PIL import Image
from running import (
    VOCAB_SIZE,
    Engine,
    Output,
    Plain,
    TreeEngine,
    assert_same,
    greedy,
    sampled,
    tokens,
)

from vllm_weaver.engine.config import SUPPORTED_ARCHITECTURES

#: A bfloat16 logit between 8 and 16, as the best ones here are, is a multiple of 2**-4; each of two
#: runs rounds it for itself.
BFLOAT16_TIE = 2**-3

OTHERS = {
    "Qwen3NextForCausalLM": architectures.next_hybrid,
    "Qwen3_5ForConditionalGeneration": architectures.multimodal_hybrid,
}


def test_every_supported_architecture_is_tested() -> None:
    shared = {"Qwen3ForCausalLM", "Qwen3_5ForCausalLM"}
    assert shared | OTHERS.keys() == SUPPORTED_ARCHITECTURES.keys()


ALONE = "VLLM_WEAVER_TEST_ALONE"


def run_alone(test: str) -> None:
    """Run one test of this file in a process that has built no engine before.

    vLLM makes its expert-parallel group with the first engine of a process, and only for a target
    with experts.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"{__file__}::{test}",
    ]
    result = subprocess.run(
        command, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-4000:]


def drafted(models: dict[str, Path], target: Path, **options: Any) -> TreeEngine:
    """A tree engine of another target, with the drafter and adapter of the tiny hybrid."""
    return TreeEngine({**models, "hybrid": target}, "hybrid", **options)


@pytest.mark.parametrize("name", OTHERS)
def test_other_hybrid_classes_are_lossless(
    tiny_models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    target = OTHERS[name](tmp_path, tiny_models["tokenizer"])
    multimodal = "ConditionalGeneration" in name
    options = {"limit_mm_per_prompt": {"image": 1, "video": 0}} if multimodal else {}
    plain = Plain(Engine(target, **options))
    trees = drafted(tiny_models, target, **options)
    assert trees.llm.llm_engine.model_config.architecture == name
    prompts = [tokens(n, 40) for n in (7, 30, 12)]
    params = [greedy(24), greedy(16), sampled(8, seed=1)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    assert_same(trees.generate(prompts, params), want, plain)
    assert trees.stats()["mean_accepted_length"] > 2
    if multimodal:
        assert_lossless_after_an_image(plain.engine, trees)


def assert_lossless_after_an_image(plain: Engine, trees: TreeEngine) -> None:
    """Positions on three axes lag behind the tokens there; a tree's depths add to all of them."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    image, _, start, end = range(VOCAB_SIZE - 4, VOCAB_SIZE)
    prompt = {
        "prompt_token_ids": [*tokens(6, 42), start, image, end, *tokens(7, 43)],
        "multi_modal_data": {"image": Image.fromarray(pixels)},
    }
    want = Output.of(plain.llm.generate(prompt, greedy(20), use_tqdm=False)[0])
    assert want.prompt.count(image) == 6
    trees.oracle.follow([want])
    assert_same([Output.of(trees.llm.generate(prompt, greedy(20), use_tqdm=False)[0])], [want])
    assert trees.stats()["mean_accepted_length"] > 2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bfloat16_with_the_native_core_differs_at_ties_only(
    tiny_models: dict[str, Path], tmp_path: Path, head_dim: int
) -> None:
    target = tiny_models["hybrid"]
    if head_dim == 128:
        target = architectures.wide_hybrid(tmp_path, tiny_models["tokenizer"])
    options = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    plain = Plain(Engine(target, **options))
    trees = drafted(tiny_models, target, **options)
    assert all(layer.native_cpu for layer in trees.runner.model_state._gdn_layers())
    prompts = [tokens(n, 41) for n in (6, 17, 40, 64)]
    want = plain.outputs(prompts, greedy(24))
    trees.oracle.follow(want)
    got = trees.generate(prompts, greedy(24))
    assert_same(got, want, plain, tie=BFLOAT16_TIE)
    # After a tie the trees hold another continuation than the one that is decoded.
    assert trees.stats()["mean_accepted_length"] > 1.2
    equal = sum(a.tokens == b.tokens for a, b in zip(got, want, strict=True))
    print(f"{equal} of {len(want)} outputs equal to the end")
