# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for vLLM is opt-in, and what it cannot run has a PyTorch form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vllm_weaver.cpu
from vllm_weaver.engine import cpu_kernels as kernels

BACKENDS = "from triton.backends import backends; print(sorted(backends))"


def run(code: str, **environment: str) -> str:
    """Output of a Python process whose environment knows nothing of the interpreter."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return result.stdout.strip()


def test_an_installed_package_adds_no_triton_backend() -> None:
    assert "cpu" not in run(BACKENDS)


def test_the_environment_adds_the_backend_to_children() -> None:
    environment = vllm_weaver.cpu.environment()
    assert environment["TRITON_INTERPRET"] == "1" and environment["OMP_NUM_THREADS"] == "1"
    assert "'cpu'" in run(BACKENDS, **environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths.count(str(vllm_weaver.cpu.SITE)) == 1


def test_enabling_works_in_process_and_refuses_to_come_too_late() -> None:
    code = "import vllm_weaver.cpu; {}vllm_weaver.cpu.enable(); " + BACKENDS
    assert "'cpu'" in run(code.format(""))
    late = "import triton\ntry:\n    import vllm_weaver.cpu; vllm_weaver.cpu.enable()\n"
    late += "except RuntimeError as error:\n    print(error)"
    assert run(late) == "call vllm_weaver.cpu.enable() before importing triton"


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, vllm_weaver.cpu; print(any(n in sys.modules for n in ('torch', 'vllm')))"
    assert run(code) == "False"


@pytest.fixture
def logits() -> Iterator[torch.Tensor]:
    yield torch.randn(5, 70, generator=torch.Generator().manual_seed(0))


def test_top_k_top_p_keeps_the_most_likely_tokens(logits: torch.Tensor) -> None:
    k = torch.tensor([1, 3, 70, 10, 70], dtype=torch.int32)
    p = torch.tensor([1.0, 1.0, 0.5, 0.4, 1.0])
    kept = torch.isfinite(kernels.top_k_top_p(logits.clone(), k, p))
    for row in range(5):
        best = logits[row].argsort(descending=True)[: k[row]]
        mass = torch.softmax(logits[row, best], 0).cumsum(0)
        count = 1 + int((mass[:-1] < p[row] - 1e-6).sum())
        assert set(kept[row].nonzero()[:, 0].tolist()) == set(best[:count].tolist())


def test_grammar_bitmask_forbids_tokens_of_active_rows_only(logits: torch.Tensor) -> None:
    allowed = torch.rand(3, 96, generator=torch.Generator().manual_seed(1)) < 0.3
    words = allowed.view(3, 3, 32).long() << torch.arange(32)
    bitmask = words.sum(-1).to(torch.int32)
    # Requests of 2 and 3 rows; masks for both rows of the first, and for a row that is not there.
    indices = torch.tensor([0, 1, 13], dtype=torch.int32)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    masked = logits.clone()
    kernels.apply_grammar_bitmask(
        masked, 70, indices, starts, bitmask, 3, 70, MASK_STRIDE=10, BLOCK_SIZE=8192
    )
    for row in range(2):
        assert torch.equal(torch.isfinite(masked[row]), allowed[row, :70])
    assert torch.equal(masked[2:], logits[2:])


def test_replacements_are_registered_where_the_interpreter_runs() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs

    kernels.register()
    assert topk_topp_sampler.apply_top_k_top_p_triton.func is kernels.top_k_top_p
    assert structured_outputs._apply_grammar_bitmask_kernel.func is kernels.apply_grammar_bitmask


def test_site_directory_holds_entry_points_alone() -> None:
    files = [f for f in Path(vllm_weaver.cpu.SITE).rglob("*") if f.is_file()]
    assert {f.name for f in files} == {"METADATA", "entry_points.txt"}
