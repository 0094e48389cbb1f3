# SPDX-License-Identifier: Apache-2.0
"""Worker and model runner: vLLM's own, with our speculator and our memory profile."""

from __future__ import annotations

import atexit
import copy
from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_weaver.engine import compat
from vllm_weaver.engine.blocks import layouts_for_trees, specs_for_trees
from vllm_weaver.engine.speculator import WeaverSpeculator
from vllm_weaver.engine.stats import times_file

logger = compat.init_logger(__name__)

# Bases of the mixins, whose methods come from the class that they are mixed into.
_Runner: Any = object
_Worker: Any = object


class TreeRunnerMixin(_Runner):
    """What the GPU and the CPU runner share."""

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.speculator = WeaverSpeculator(vllm_config, device)
        options = self.speculator.options
        logger.info(
            "vllm-weaver: proposal %s, %d nodes, draft depth %d, adapter %s",
            options.proposal,
            self.speculator.budget,
            self.speculator.depth,
            options.adapter or "none",
        )

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Profile with the logits of whole trees, not of one row per request."""
        rows = min(self.model_state.max_step_rows, self.max_num_tokens)
        logits = self.model.compute_logits(hidden_states[:1].expand(rows, -1).contiguous())
        super()._dummy_sampler_run(hidden_states)
        del logits

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture as vLLM does; with ``adapt``, leave the graphs' times for the scheduler."""
        size = super().capture_model(profile_only=profile_only)
        if self.speculator.options.adapt and not profile_only:
            times = compat.measure_steps(self)
            if times is not None and self.vllm_config.parallel_config.rank == 0:
                file = times_file(self.vllm_config.instance_id)
                times.save(file)
                atexit.register(file.unlink, missing_ok=True)
        return size


class WeaverModelRunner(TreeRunnerMixin, GPUModelRunner):
    """Model runner on a GPU."""


class TreeWorkerMixin(_Worker):
    """What the GPU and the CPU worker share."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        compat.install_layers()
        # Before vLLM fits it to the states.
        self._block_size = vllm_config.cache_config.block_size
        super().__init__(vllm_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, with no more rows of trees than a step has.

        vLLM decodes as many requests as there may be, all with every draft, which is 4,096 rows of
        logits for 64 requests of 63: memory that no step needs and no profile has accounted for.
        """
        runner = self.model_runner
        whole = runner.scheduler_config
        # A pair at least: vLLM warms up batches of which one request has no drafts.
        most = max(2, runner.model_state.max_step_rows // runner.decode_query_len)
        fewer = copy.copy(whole)
        fewer.max_num_seqs = min(whole.max_num_seqs, most)
        runner.scheduler_config = fewer
        try:
            return super().compile_or_warm_up_model()
        finally:
            runner.scheduler_config = whole

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Cache specs of all layers, without the room that vLLM leaves in states for drafts."""
        supported = super().get_supported_kv_cache_layouts()
        return specs_for_trees(
            self.vllm_config, self._block_size, supported, super().get_kv_cache_spec
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Names of the layouts that vLLM may choose from, the best first."""
        return layouts_for_trees(self.vllm_config, super().get_supported_kv_cache_layouts())

    def weaver_stats(self, reset: bool = False) -> dict[str, Any]:
        """Counters of tree decoding; call with ``LLM.collective_rpc("weaver_stats")``.

        Args:
            reset: start counting anew after reading.

        Returns:
            See :meth:`vllm_weaver.engine.stats.StepStats.snapshot`.
        """
        stats = self.model_runner.model_state.stats
        snapshot = stats.snapshot()
        if reset:
            stats.reset()
        return snapshot

    def weaver_last_trees(self) -> list[dict[str, Any]]:
        """Trees verified by the last step, for people to look at; waits for the device.

        Returns:
            One dictionary per request that carried a tree: ``tokens``, ``parents`` and
            ``depths`` of its nodes, root first, and ``path``, the accepted ones. Empty if the
            last step verified none.
        """
        step = self.model_runner.model_state.step
        return [] if step is None else step.describe()


class WeaverWorker(TreeWorkerMixin, Worker):
    """Worker on a GPU."""

    def _make_model_runner(self) -> WeaverModelRunner:
        return WeaverModelRunner(self.vllm_config, self.device)
