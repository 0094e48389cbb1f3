# SPDX-License-Identifier: Apache-2.0
"""Installed but not asked for, the plugin changes nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import generate
from running import COMMON, Engine, greedy, tokens

PROMPTS = [tokens(n, 60) for n in (5, 20)]
#: All of the package that an engine without the key may load.
HOOKS = {"vllm_weaver", "vllm_weaver.engine", "vllm_weaver.engine.plugin"}
INTERPRETER = {
    "vllm_weaver.cpu",
    "vllm_weaver.engine.cpu_kernels",
    "vllm_weaver.engine.compat",
}


#: The dense target in float32; the hybrid in bfloat16, which vLLM's own core needs.
DTYPES = {"dense": "float32", "hybrid": "bfloat16"}


@pytest.mark.slow
def test_engines_without_the_key_are_vllms_own(
    tiny_models: dict[str, Path], trees_of: Callable[..., Any]
) -> None:
    """In fresh processes with and without plugins, and in one that has run trees."""
    runs = [
        {
            "engine": {**COMMON, "model": str(tiny_models[target]), "dtype": dtype},
            "prompts": PROMPTS,
            "params": {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
        }
        for target, dtype in DTYPES.items()
    ]
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    installed = generate({"runs": runs}, **in_process)
    absent = generate({"runs": runs}, VLLM_PLUGINS="", **in_process)
    assert set(installed["loaded"]) - _backend(installed) <= HOOKS | INTERPRETER
    assert "vllm_weaver.engine.plugin" in installed["loaded"]
    assert not any("engine" in name for name in absent["loaded"])
    for target, run, other in zip(DTYPES, installed["runs"], absent["runs"], strict=True):
        assert run == other
        assert not any(name.startswith("vllm_weaver") for name in run["classes"])
        trees_of(target)
        after = Engine(tiny_models[target], dtype=DTYPES[target])
        assert [x.tokens for x in after.generate(PROMPTS, greedy(12))] == run["tokens"]


def _backend(answer: dict[str, Any]) -> set[str]:
    return {name for name in answer["loaded"] if name.startswith("vllm_weaver.cpu.triton_backend")}


def test_layers_of_an_engine_without_the_key_have_vllms_states(
    tiny_models: dict[str, Path], trees_of: Callable[..., Any]
) -> None:
    """Beside an engine with trees in the same process, where the layer class is registered."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    trees = trees_of("hybrid")
    speculative = {
        "method": "dflash",
        "model": str(tiny_models["hybrid-dflash8"]),
        "num_speculative_tokens": 3,
    }
    stock = Engine(tiny_models["hybrid"], dtype="bfloat16", speculative_config=speculative)
    for engine, slots in ((trees, 0), (stock, 3)):
        layers = engine.runner.vllm_config.compilation_config.static_forward_context.values()
        gdn = [layer for layer in layers if isinstance(layer, QwenGatedDeltaNetAttention)]
        assert len(gdn) == 3
        for layer in gdn:
            spec = layer.get_kv_cache_spec(engine.runner.vllm_config)
            assert spec.num_speculative_blocks == slots
            assert layer.trees == (slots == 0)
            own = QwenGatedDeltaNetAttention.get_state_shape(layer)
            assert (layer.get_state_shape() == own) == (slots == 3)
            backend = layer.get_attn_backend().__module__
            assert backend.startswith("vllm_weaver" if slots == 0 else "vllm.v1")
