# SPDX-License-Identifier: Apache-2.0
"""A CPU platform whose workers Ray can place, for tests alone.

vLLM names no Ray resource for a CPU. Here each worker asks for one of Ray's "GPUs", which the
test's Ray cluster claims to have. An entry point in ``ray_site``, on ``PYTHONPATH`` for the test.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, with a resource that Ray knows."""

    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",)


def register() -> str:
    """Entry point of ``vllm.platform_plugins``: the name of the class."""
    return f"{__name__}.{RayCpuPlatform.__name__}"
