# SPDX-License-Identifier: Apache-2.0
"""Candidate pools: the definition against a sort in Python, the kernels against the definition.

The kernels run on a GPU if there is one, else in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
from interpreter import DEVICE, assert_passes_interpreted, needs_gpu, needs_kernel, runs_elsewhere
from torch import Tensor

from vllm_weaver.ops import top_pool

INF, NAN = math.inf, math.nan
KINDS = (
    *("normal", "rounded", "equal", "few finite", "all -inf", "NaN", "rising", "falling"),
    *("one group", "zeros", "+inf"),
)


def rows(kind: str, N: int, V: int, dtype: torch.dtype) -> Tensor:
    """Logits [N, V] on the CPU."""
    gen = torch.Generator().manual_seed(V)
    x = torch.randn(N, V, generator=gen) * 3
    if kind == "rounded":
        x = x.round()
    elif kind == "equal":
        x = torch.full_like(x, 1.5)
    elif kind == "few finite":
        x[:, 3:] = -INF
    elif kind == "all -inf":
        x = torch.full_like(x, -INF)
    elif kind == "NaN":
        x[:, ::3] = NAN
    elif kind in ("rising", "falling"):
        x = torch.arange(V).expand(N, V) / V
        x = (x if kind == "rising" else x.flip(1)).clone()
    elif kind == "one group":
        x[:, V // 2 : V // 2 + 100] += 50
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "+inf":
        x[:, V // 3] = INF
    return x.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_definition_is_a_stable_sort(kind: str) -> None:
    x = rows(kind, 2, 50, torch.float32)
    ids, logits, log_probs = top_pool(x, 20, backend="reference")
    assert ids.dtype == torch.int64
    assert logits.dtype == log_probs.dtype == torch.float32
    for n, row in enumerate(x.tolist()):
        clean = [-INF if math.isnan(v) else v for v in row]
        order = sorted(range(50), key=lambda i: -clean[i])[:20]
        assert ids[n].tolist() == order
        assert logits[n].tolist() == [clean[i] for i in order]
        total = torch.tensor(clean, dtype=torch.float64).logsumexp(0)
        expected = torch.tensor([clean[i] for i in order], dtype=torch.float64) - total
        finite = torch.isfinite(logits[n])
        actual = log_probs[n][finite].double()
        torch.testing.assert_close(actual, expected[finite], atol=1e-6, rtol=1e-6, equal_nan=True)
        assert bool((log_probs[n][logits[n] == -INF] == -INF).all())


def check_kernels(x: Tensor, count: int) -> None:
    expected = top_pool(x, count, backend="reference")
    ids, logits, log_probs = (y.cpu() for y in top_pool(x.to(DEVICE), count, backend="triton"))
    assert torch.equal(ids, expected[0])
    assert torch.equal(logits, expected[1])
    torch.testing.assert_close(log_probs, expected[2], atol=1e-5, rtol=1e-5, equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_on_hard_rows(kind: str, dtype: torch.dtype) -> None:
    check_kernels(rows(kind, 2, 1000, dtype), 20)


@needs_kernel
def test_kernels_agree_on_float16() -> None:
    check_kernels(rows("rounded", 2, 1000, torch.float16), 20)


@needs_kernel
@pytest.mark.parametrize(
    ("V", "count"),
    [(1, 1), (5, 5), (127, 16), (128, 128), (129, 129), (8191, 17), (8192, 128), (8193, 512)],
)
def test_kernels_agree_around_block_sizes(V: int, count: int) -> None:
    check_kernels(rows("rounded", 1, V, torch.bfloat16 if V % 2 else torch.float32), count)


@needs_kernel
def test_kernels_read_strided_rows() -> None:
    wide = rows("normal", 3, 700, torch.float32)
    wide[:, 600:] = INF
    check_kernels(wide[:, :600], 33)


@needs_kernel
def test_no_rows() -> None:
    ids, logits, log_probs = top_pool(torch.zeros(0, 40, device=DEVICE), 8, backend="triton")
    assert ids.shape == logits.shape == log_probs.shape == (0, 8)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernel)])
def test_results_go_where_they_are_wanted(backend: str) -> None:
    x = rows("normal", 6, 700, torch.float32).to(DEVICE if backend == "triton" else "cpu")
    buffers = (
        torch.zeros(2, 5, 16, dtype=torch.int64, device=x.device),
        *torch.zeros(2, 2, 5, 16, device=x.device),
    )
    out = tuple(b[:, :3].contiguous().flatten(0, 1) for b in buffers)
    found = top_pool(x, 16, out=out, backend=backend)
    assert all(a is b for a, b in zip(found, out, strict=True))
    for a, b in zip(found, top_pool(x, 16, backend=backend), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="not int64, float32 and float32"):
        top_pool(x, 16, out=(out[1], out[1], out[2]), backend=backend)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_at_full_size(kind: str, dtype: torch.dtype) -> None:
    check_kernels(rows(kind, 15, 248_320, dtype), 512)


@needs_gpu
def test_replayed_graph_follows_its_input() -> None:
    x = rows("normal", 15, 50_000, torch.bfloat16).to(DEVICE)
    top_pool(x, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = top_pool(x, 512)
    x.copy_(rows("rounded", 15, 50_000, torch.bfloat16))
    graph.replay()
    expected = top_pool(x.cpu(), 512, backend="reference")
    assert torch.equal(result[0].cpu(), expected[0])
    torch.testing.assert_close(result[2].cpu(), expected[2], atol=1e-5, rtol=1e-5)


def test_unfit_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="count is 9, expected 1 to the 8 columns"):
        top_pool(torch.zeros(2, 8), 9)
    with pytest.raises(ValueError, match=r"expected \[N, V\]"):
        top_pool(torch.zeros(8), 1)
    with pytest.raises(ValueError, match="int64, expected float16"):
        top_pool(torch.zeros(2, 8, dtype=torch.int64), 1)


@needs_kernel
def test_kernels_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="count to 1024"):
        top_pool(torch.zeros(1, 3000, device=DEVICE), 1025, backend="triton")
    with pytest.raises(ValueError, match="unit stride"):
        top_pool(torch.zeros(40, 3, device=DEVICE).T, 2, backend="triton")


@runs_elsewhere
def test_kernels_hold_in_the_interpreter() -> None:
    """Every test of this file, in a process that interprets the kernels."""
    assert_passes_interpreted(__file__)
