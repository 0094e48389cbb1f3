# SPDX-License-Identifier: Apache-2.0
"""Cache blocks of hybrid targets: sized without room for drafts, target and drafter together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from running import Engine, Plain, TreeEngine, assert_same, greedy, sampled, tokens
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.e2e.memory import Blocks, CacheShape, blocks_of
from vllm_weaver.engine.blocks import block_tokens, layouts_for_trees

BUDGET = 24
CONTEXTS = (1024, 4096, 16384)
#: Qwen3.6-27B and its drafter.
TARGET = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DRAFTER = {"num_hidden_layers": 5, "num_key_value_heads": 8, "head_dim": 128}


def specs_27b(kind: str, block: int, rows: int = 0) -> dict[str, Any]:
    """Cache specs as vLLM's layers give them; `block` tokens in a block."""

    def attention(config: dict[str, Any]) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=block,
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            dtype=torch.bfloat16,
        )

    specs: dict[str, Any] = {}
    for index, layer in enumerate(TARGET["layer_types"]):
        specs[f"layers.{index}"] = (
            attention(TARGET)
            if layer == "full_attention"
            else MambaSpec(
                shapes=((3 + rows, 10240), (48, 128, 128)),
                dtypes=(torch.bfloat16, torch.float32),
                block_size=1 << 15,
                page_size_padded=None if kind == "side" else 4096 * block,
                num_speculative_blocks=rows,
            )
        )
    if kind != "ar":
        specs |= {f"drafter.{index}": attention(DRAFTER) for index in range(5)}
    return specs


def grouped(specs: dict[str, Any], layout: KVCacheLayout) -> Blocks:
    """The blocks that vLLM makes of the specs."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=None,
        cache_config=cache,
    )
    groups = get_kv_cache_groups(config, specs)
    return blocks_of(get_kv_cache_config_from_groups(config, groups, 20 << 30))


def test_the_estimate_is_what_vllm_makes_of_the_27bs_layers() -> None:
    """And what a sequence costs beyond plain decoding: its drafter's rows, and a block at most."""
    shape = CacheShape.of(TARGET, DRAFTER, 2)
    apart = CacheShape.of(TARGET, DRAFTER, 2, side_by_side=False)
    plain = shape.blocks("ar", 0)
    assert plain == grouped(specs_27b("ar", 784), KVCacheLayout.LBNHC) == _plain_blocks()
    stock = shape.blocks("stock", 15)
    assert stock == grouped(specs_27b("stock", 864, 15), KVCacheLayout.LBNHC)
    assert apart.blocks("weaver", 63) == grouped(specs_27b("apart", 784), KVCacheLayout.LBNHC)
    specs = specs_27b("side", 784)
    state = 48 * 128 * 128 * 4 + 3 * 10240 * 2
    drafts = [name for name in specs if name.startswith("drafter")]
    block = -(-block_tokens(specs, drafts, state) // 16) * 16
    found = grouped(specs_27b("side", block), KVCacheLayout.BLNHC)
    assert shape.blocks("weaver", 63) == found == Blocks(608, 608 * 21 * 4096, 1, 3)
    for context, most in zip(CONTEXTS, (5e6, 61e6, 389e6), strict=True):
        beyond = shape.sequence_bytes("weaver", 63, context)
        beyond -= shape.sequence_bytes("ar", 0, context)
        assert beyond < min(most, 5 * 4096 * (context + 127) + found.nbytes)


def _plain_blocks() -> Blocks:
    return Blocks(tokens=784, nbytes=16 * 784 * 4096, attention=1, states=3)


@pytest.fixture
def other_heads(tiny_models: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The tiny models, with a drafter whose heads are not the hybrid's."""
    directory = tmp_path / "hybrid-dflash8"
    directory.mkdir()
    models._write_dflash(directory, (8, 4, 32), 8, 77)
    for file in tiny_models["tokenizer"].iterdir():
        shutil.copy(file, directory / file.name)
    return {**tiny_models, "hybrid-dflash8": directory}


def test_blocks_leave_no_room_for_drafts(
    tiny_models: dict[str, Path], other_heads: dict[str, Path]
) -> None:
    """A CPU keeps layers apart: blocks and pages are those of plain decoding."""
    options: dict[str, Any] = {"block_size": 32}
    plain = Engine(tiny_models["hybrid"], **options)
    speculative = {
        "method": "dflash",
        "model": str(other_heads["hybrid-dflash8"]),
        "num_speculative_tokens": BUDGET,
    }
    stock = Engine(tiny_models["hybrid"], speculative_config=speculative, **options)
    trees = TreeEngine(other_heads, "hybrid", budget=BUDGET, **options)
    sizes = []
    for engine in (plain, trees, stock):
        cache = engine.runner.cache_config
        sizes.append((cache.block_size, cache.mamba_page_size_padded))
        assert engine.scheduler.cache_config.block_size == cache.block_size
    assert sizes[0] == sizes[1] == (96, 96 * 1024)
    assert sizes[2] == (128, 128 * 1024)
    assert trees.runner.cache_config.kv_cache_layout == "LBHNC"
    groups = [len(x.layer_names) for x in trees.runner.kv_cache_config.kv_cache_groups]
    assert sum(groups) == 6


@pytest.mark.parametrize("caching", [False, True])
def test_layers_side_by_side_are_lossless(
    plain_of: Callable[..., Plain], other_heads: dict[str, Path], side_by_side: None, caching: bool
) -> None:
    """One group holds target and drafter; paths cross the boundaries of its small blocks."""
    plain = plain_of("hybrid")
    options: dict[str, Any] = {"block_size": 32, "enable_prefix_caching": caching}
    speculation = {"disable_eagle_block_drop": True}
    trees = TreeEngine(other_heads, "hybrid", speculation=speculation, **options)
    config = trees.runner.kv_cache_config
    assert config.kv_cache_layout == "BLHNC"
    names = [set(group.layer_names) for group in config.kv_cache_groups]
    assert sorted(map(len, names)) == [1, 1, 1, 3]
    # A state of 71,680 bytes; three layers of 1,024 bytes a token.
    assert blocks_of(config) == Blocks(32, 32 * 3 * 1024, 1, 6 if caching else 3)
    prompts = [tokens(n, 50) for n in (7, 30, 60, 90)]
    params = [greedy(30), sampled(24, seed=3), greedy(40), greedy(20)]
    want = plain.outputs(prompts, params)
    trees.oracle.follow(want)
    for round_ in range(2):
        got = trees.generate(prompts, params)
        assert_same(got, want, plain)
        assert trees.stats()["mean_accepted_length"] > 2
        cached = [x.cached_tokens for x in got]
        assert cached == ([0, 0, 32, 64] if caching and round_ else [0] * 4)


def test_layouts_are_left_alone_unless_the_user_asks_for_one_side_by_side(
    trees_of: Callable[..., TreeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trees_of("hybrid").runner.vllm_config
    names = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC"]
    assert layouts_for_trees(config, names) == names
    for asked, left in (("BLHNC", ["BLHNC"]), ("NHD", names), ("LBHNC", names)):
        monkeypatch.setattr("vllm_weaver.engine.blocks.requested_layout", lambda x=asked: x)
        assert layouts_for_trees(config, names) == left
        assert layouts_for_trees(config, ["LBNHC"]) == ["LBNHC"]
        assert layouts_for_trees(trees_of("dense").runner.vllm_config, names) == names
