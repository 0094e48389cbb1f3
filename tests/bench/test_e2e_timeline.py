# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step: classification, idle time, and waits of the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.e2e.plots import plot_step
from benchmarks.e2e.timeline import (
    blocking_syncs,
    category,
    classify,
    host_syncs,
    one_step,
    read_trace,
    summarise,
    table,
)


def event(name: str, kind: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": kind, "ts": start, "dur": duration, "tid": 1,
        "args": arguments,
    }  # fmt: skip


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture
def gpu_trace(tmp_path: Path) -> Path:
    """Two steps of 100 us: 40 GEMM, 20 GDN, 10 drafter by its range, 30 idle."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        t, n = 1000 + 100.0 * step, 10 * step
        events += [
            event("benchmark.step", "user_annotation", t - 500, 90),
            event("cudaGraphLaunch", "cuda_runtime", t - 500, 5, correlation=n + 1),
            event("benchmark.drafter", "user_annotation", t - 480, 20),
            event("cudaLaunchKernel", "cuda_runtime", t - 470, 2, correlation=n + 2),
            event("nvjet_tst_128x64_bf16", "kernel", t, 40, correlation=n + 1),
            event("_tree_verify_kernel", "kernel", t + 40, 20, correlation=n + 1),
            event("nvjet_tst_64x64_bf16", "kernel", t + 90, 10, correlation=n + 2),
        ]
    events += [
        event("cudaStreamSynchronize", "cuda_runtime", 700, 3, correlation=90),
        event("cudaEventSynchronize", "cuda_runtime", 710, 3),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 1060, 1, correlation=91),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 1062, 1, correlation=92),
        event("aten::item", "cpu_op", 720, 5),
        event("aten::_local_scalar_dense", "cpu_op", 721, 3),
    ]
    return write(tmp_path / "gpu.json", events)


def test_kernels_are_told_apart_by_name_and_by_the_range_around_their_launch(
    gpu_trace: Path,
) -> None:
    found = summarise(read_trace(gpu_trace), steps=2)
    assert found["source"] == "GPU kernels"
    categories = found["categories"]
    assert (found["graph_launches_per_step"], found["kernel_launches_per_step"]) == (1, 1)
    assert categories["GEMM"] == pytest.approx(0.040)
    assert categories["GDN"] == pytest.approx(0.020)
    assert categories["drafter"] == pytest.approx(0.010)
    assert categories["copy"] == pytest.approx(0.001)
    assert categories["idle"] == pytest.approx(0.029)
    assert sum(categories.values()) == pytest.approx(found["ms_per_step"])


def test_waits_of_the_host_are_counted_once(gpu_trace: Path) -> None:
    found = host_syncs(read_trace(gpu_trace))
    assert found == {
        "cudaStreamSynchronize": 1,
        "cudaEventSynchronize": 1,
        "copy to pageable memory": 1,
        "aten::item": 1,
    }
    # Neither the wait for an event, nor the operator without a call of CUDA inside it; the stream's
    # is outside both steps.
    assert blocking_syncs(read_trace(gpu_trace)) == {"copy to pageable memory": 1}


def test_a_wait_inside_a_step_stalls(tmp_path: Path) -> None:
    trace = [
        event("benchmark.step", "user_annotation", 0, 50),
        event("aten::item", "cpu_op", 10, 5),
        event("cudaStreamSynchronize", "cuda_runtime", 11, 3),
        event("kernel", "kernel", 8, 5, correlation=1),
        event("cudaDeviceSynchronize", "cuda_runtime", 60, 3),
    ]
    found = blocking_syncs(read_trace(write(tmp_path / "stall.json", trace)))
    assert found == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("fused_recurrent_gated_delta_rule_packed_decode_kernel", "GDN"),
        ("_causal_conv1d_update_kernel", "GDN"),
        ("nvjet_tst_192x64_64x5_1x2_h_bz_TNT", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "GEMM"),
        ("_gumbel_sample_kernel", "sampler"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2>", "sampler"),
        ("triton_red_fused_rms_norm_add_0", "norm, rotary, activation"),
        ("vllm::act_and_mul_kernel", "norm, rotary, activation"),
        ("_reshape_and_cache_kernel_flash", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("elementwise_kernel", "other"),
    ],
)
def test_names_of_kernels(name: str, expected: str) -> None:
    assert category(name) == expected


def test_a_trace_of_a_cpu_is_classified_by_operators(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("benchmark.step"):
                y = x @ x
                with torch.profiler.record_function("benchmark.drafter"):
                    y = (y @ x).softmax(-1)
                float(y.sum())
    file = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(file))
    events = read_trace(file)
    found = summarise(events, steps=3)
    assert found["source"] == "CPU operators"
    assert {"GEMM", "drafter"} <= found["categories"].keys()
    assert found["host_syncs_per_step"] == {"aten::item": 1}
    labels = [label for _, label in classify(events)]
    assert labels.count("drafter") == 3 * 2  # product and softmax, whatever lies inside them
    assert "| GEMM |" in table(found)
    plot_step({"ar": one_step(events, 3)}, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
