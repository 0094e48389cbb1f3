# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of a worker: vLLM's `worker_extension_cls`.

Importing it also registers the `expanded` load format in the worker's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import benchmarks.expand.loader  # noqa: F401
from benchmarks.e2e.memory import blocks_of

#: What a trace tells apart: range, owner, and its method, where an engine has it.
_RANGES = (
    ("benchmark.drafter", "speculator", "propose"),
    ("benchmark.weave", "speculator.proposer", "propose"),
    ("benchmark.sampler", "", "sample"),
    ("benchmark.commit", "model_state", "postprocess_state"),
)

#: Lengths of sequences, in tokens, whose cache is reported.
_CONTEXTS = (1024, 4096, 16384)


class BenchmarkExtension:
    """Methods for `LLM.collective_rpc`."""

    def benchmark_ranges(self: Any) -> list[str]:
        """Put `record_function` ranges around the parts of a step; says which were found."""
        found = []
        for name, path, method in _RANGES:
            owner = self.model_runner
            for part in filter(None, path.split(".")):
                owner = getattr(owner, part, None)
            function = getattr(owner, method, None)
            if callable(function):
                setattr(owner, method, _ranged(name, function))
                found.append(name)
        return found

    def benchmark_memory(self: Any) -> dict[str, Any]:
        """Bytes of weights, caches and the rest, and what one sequence's state takes."""
        runner = self.model_runner
        modules = [runner.model]
        speculator = getattr(runner, "speculator", None)
        for owner in (speculator, getattr(speculator, "proposer", None)):
            for name in ("model", "adapter"):
                module = getattr(owner, name, None)
                if isinstance(module, torch.nn.Module):
                    modules.append(module)
        seen: dict[int, int] = {}
        # Those of another process are none of this allocator's.
        shared = self.vllm_config.load_config.load_format == "ipc_cache"
        theirs = {t.untyped_storage().data_ptr() for t in modules[0].parameters() if shared}
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in theirs:
                    seen[storage.data_ptr()] = storage.nbytes()
        config = runner.kv_cache_config
        blocks = blocks_of(config)
        drafts = self.vllm_config.num_speculative_tokens
        fresh = 2 * drafts + 1 if drafts else 0
        found = {
            "weight_bytes": sum(seen.values()),
            "cache_bytes": blocks.nbytes * config.num_blocks,
            "cache_blocks": config.num_blocks,
            "cache_block_tokens": blocks.tokens,
            "cache_layout": config.kv_cache_layout,
            "cache_groups": [len(group.layer_names) for group in config.kv_cache_groups],
            "state_bytes_per_sequence": blocks.states * blocks.nbytes,
            "cache_bytes_per_sequence": {
                str(tokens): blocks.sequence_bytes(tokens + fresh) for tokens in _CONTEXTS
            },
        }
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            stats = torch.cuda.memory_stats()
            found |= {
                "device_bytes": total,
                "device_free_bytes": free,
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
                "other_bytes": stats["allocated_bytes.all.current"]
                - found["weight_bytes"]
                - found["cache_bytes"],
            }
        return found

    def benchmark_graphs(self: Any) -> dict[str, Any]:
        """Graph mode and compilation, as the worker resolved them."""
        config = self.vllm_config.compilation_config
        sizes = list(config.cudagraph_capture_sizes or [])
        return {
            "cudagraph_mode": str(config.cudagraph_mode),
            "largest_capture": max(sizes, default=0),
            "captures": len(sizes),
            "compilation_mode": str(config.mode),
            "async_scheduling": bool(self.vllm_config.scheduler_config.async_scheduling),
            "worker": type(self).__name__,
        }


def _ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*arguments, **keywords)

    return call
