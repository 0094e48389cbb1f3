# SPDX-License-Identifier: Apache-2.0
"""Worker and model runner on a CPU.

A module of its own: vLLM's CPU runner puts placeholders in place of PyTorch's CUDA events and
streams when it is imported, so no process with a GPU may import it.
"""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_weaver.engine.worker import TreeRunnerMixin, TreeWorkerMixin


class WeaverCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """Model runner on a CPU."""


class WeaverCPUWorker(TreeWorkerMixin, CPUWorker):
    """Worker on a CPU."""

    def init_device(self) -> None:
        """Set the device up as vLLM does, then build our runner in place of its own."""
        super().init_device()
        self.model_runner = WeaverCPUModelRunner(self.vllm_config, self.device)
