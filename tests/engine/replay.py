# SPDX-License-Identifier: Apache-2.0
"""Whole-step CUDA graphs without a GPU: a replay runs the forward pass that was captured.

What a graph freezes is frozen here too: the metadata built at capture, the inputs given then, the
number of requests. A replay sees a new batch only through tensors at the addresses of that time,
so a buffer that is made anew each step, or a padding request that is not inert, gives wrong tokens
here as it would on a GPU. vLLM's own dispatch, padding and output buffers are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import TreeEngine
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from vllm_weaver.engine.compat import decode_widths


class Graph:
    """A captured forward pass, and how often it was replayed."""

    def __init__(self, forward: Callable[[CUDAGraphMode], None]):
        self.forward = forward
        self.replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        self.forward(CUDAGraphMode.NONE)


@torch.inference_mode()
def _capture(manager: CudaGraphManager, create_forward: Any, *_: Any) -> None:
    for desc in manager._capture_descs[CUDAGraphMode.FULL]:
        create_forward(desc, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward(desc, warmup=False)
        forward(CUDAGraphMode.NONE)
        manager.graphs[desc] = Graph(forward)
    manager._graphs_captured = True


def _allow_graphs(compilation: Any, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Graphs of these sizes in tokens, on a CPU, too."""
    monkeypatch.setattr(compilation, "cudagraph_capture_sizes", sizes)
    monkeypatch.setattr(compilation, "max_cudagraph_capture_size", sizes[-1])
    monkeypatch.setattr(
        "vllm.platforms.cpu.CpuPlatform.get_global_graph_pool", lambda *_: None, raising=False
    )


def plan_drafter(trees: TreeEngine, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> Any:
    """Plan the drafter's graphs for a target with graphs of these sizes; returns the manager."""
    drafter = trees.runner.speculator
    _allow_graphs(drafter.full_config.compilation_config, monkeypatch, sizes)
    support = SimpleNamespace(min_cg_support=AttentionCGSupport.ALWAYS)
    monkeypatch.setattr(drafter, "attn_cg_support", support)
    monkeypatch.setattr(drafter, "query_cudagraph_manager", None)
    drafter.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    return drafter.query_cudagraph_manager


def capture_target(
    trees: TreeEngine, monkeypatch: pytest.MonkeyPatch, batches: tuple[int, ...]
) -> dict[Any, Graph]:
    """Let the target's uniform batches of an engine run as replays.

    Args:
        trees: an engine whose runner captured nothing.
        monkeypatch: undoes it.
        batches: requests of the graphs; a batch between two of them is padded.

    Returns:
        The graphs by their descriptor.
    """
    runner = trees.runner
    rows = runner.decode_query_len
    compilation = runner.vllm_config.compilation_config
    widths = decode_widths(runner.vllm_config)
    sizes = sorted({n * width for n in batches for width in widths})
    _allow_graphs(compilation, monkeypatch, sizes)
    monkeypatch.setattr(CudaGraphManager, "capture", _capture)
    manager = ModelCudaGraphManager(
        runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, rows
    )
    # An engine that knows of graphs from its start has room for all of them.
    full = manager._capture_descs[CUDAGraphMode.FULL]
    fits = runner.model_state.buffers.fits
    full[:] = [d for d in full if fits(d.num_reqs, d.num_tokens // d.num_reqs)]
    manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
        use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
    )
    monkeypatch.setattr(runner, "cudagraph_manager", manager)
    return manager.graphs


def capture_drafter(
    trees: TreeEngine, monkeypatch: pytest.MonkeyPatch, batches: tuple[int, ...]
) -> dict[int, Graph]:
    """Let the drafter's passes of an engine run as replays; returns the graphs by requests.

    What is frozen is the number of requests, and with it the rows of context that a replay stores.
    The metadata of the drafter's attention is the newest: a CPU's holds numbers of its batch.
    """
    drafter = trees.runner.speculator
    sizes = sorted({n * width for n in batches for width in drafter.widths})
    build, newest = drafter._build_uniform_attn_metadata, []

    def remember(*arguments: Any, **named: Any) -> Any:
        newest[:] = [build(*arguments, **named)]
        return newest[0]

    def forward(requests: int, rows: int, mode: CUDAGraphMode) -> None:
        drafter._prepare_graph_forward(requests, None)
        slots = drafter.block_tables.slot_mappings[:, :rows]
        by_layer = build_slot_mappings_by_layer(slots, drafter.kv_cache_config)
        drafter._generate_draft(requests, rows, newest[0], by_layer, None, mode)

    def capture(manager: CudaGraphManager, *_: Any) -> None:
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            manager.graphs[desc] = Graph(partial(forward, desc.num_reqs, desc.num_tokens))
        manager._graphs_captured = True

    monkeypatch.setattr(drafter, "_build_uniform_attn_metadata", remember)
    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    manager = plan_drafter(trees, monkeypatch, sizes)
    drafter.capture()
    return {desc.num_reqs: graph for desc, graph in manager.graphs.items()}
