# SPDX-License-Identifier: Apache-2.0
"""Path rows of hidden states against a copy of each row by hand, reference and kernel alike.

The kernel runs on a GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import random

import pytest
import torch
from interpreter import CUDA, DEVICE, needs_kernel
from torch import Tensor

from vllm_weaver.ops import gather_paths, gather_rows

TRITON = pytest.param("triton", marks=needs_kernel)
both = pytest.mark.parametrize("backend", ["reference", TRITON])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu().clone()


def assert_moves(
    sources: list[Tensor],
    starts: list[int],
    path: list[list[int]],
    length: list[int],
    backend: str,
    dtype: torch.dtype = torch.int32,
) -> None:
    """`sources` are moved in place and compared with single copies from a snapshot."""
    expected = []
    for source in sources:
        before = bits(source)
        after = before.clone()
        for start, nodes, count in zip(starts, path, length, strict=True):
            for i in range(1, min(count, len(nodes))):
                after[start + i] = before[start + nodes[i]]
        expected.append(after)
    device = DEVICE if backend == "triton" else "cpu"
    moved = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
        for x in sources
    ]
    index = [torch.tensor(x, dtype=dtype, device=device) for x in (starts, path, length)]
    gather_rows(moved, *index, backend=backend)
    for got, want in zip(moved, expected, strict=True):
        assert torch.equal(bits(got), want)


def rows(n: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@both
@pytest.mark.parametrize("seed", range(3))
def test_random_paths_lead_their_requests_and_other_rows_stay(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    starts, path, length, at = [], [], [], 0
    for _ in range(3):
        T, n = rng.randint(8, 20), rng.randint(0, 8)
        starts.append(at)
        path.append(([0, *sorted(rng.sample(range(1, T), 7))][:n] + [-1] * 8)[:8])
        length.append(n)
        at += T
    sources = [rows(at + 5, 40, torch.bfloat16, i) for i in range(3)]
    assert_moves(sources, starts, path, length, backend)


@both
def test_path_shifted_by_one_reads_every_row_before_it_is_overwritten(backend: str) -> None:
    path = [0, *range(2, 40)]
    assert_moves([rows(64, 24, torch.float32)], [3], [path], [len(path)], backend)


@both
@pytest.mark.parametrize("count", [1, 8, 9])
def test_any_number_of_tensors_moves(count: int, backend: str) -> None:
    sources = [rows(12, 16, torch.float16, i) for i in range(count)]
    assert_moves(sources, [2], [[0, 3, 7, -1]], [3], backend)


@both
def test_widths_types_and_strides_may_differ(backend: str) -> None:
    sources = [
        rows(12, 16, torch.float32),
        rows(12, 7, torch.bfloat16),
        rows(12, 33, torch.float8_e4m3fn),
        rows(12, 48, torch.float16)[:, 8:24],
        rows(12, 3, torch.float64),
        torch.empty(12, 0),
    ]
    sources[0][5] = float("nan")
    assert_moves(sources, [1, 7], [[0, 2, 4], [0, 3, -1]], [3, 2], backend, torch.int64)


@both
def test_rows_wider_than_a_program_arrive_whole(backend: str) -> None:
    assert_moves([rows(6, 700, torch.bfloat16)], [0], [[0, 2, 5]], [3], backend)


@both
def test_requests_without_a_move_are_left_alone_wherever_they_start(backend: str) -> None:
    paths = [[0, 2, 3], [0, 2, 3], [0, 2, -1]]
    assert_moves([rows(8, 8, torch.float32)], [10**6, -5, 4], paths, [0, 1, 2], backend)
    assert_moves([rows(8, 8, torch.float32)], [10**6, -5, 4], paths, [1, 1, 0], backend)


@both
def test_a_tensor_given_twice_is_moved_once(backend: str) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    source = rows(8, 8, torch.float32).to(device)
    expected = source.clone()
    expected[1:3] = source[[2, 4]]
    index = [torch.tensor(x, device=device) for x in ([0], [[0, 2, 4]], [3])]
    gather_rows([source, source], *index, backend=backend)
    assert torch.equal(source, expected)


@both
@pytest.mark.parametrize(
    ("count", "width", "dtype"),
    [(1, 5, torch.bfloat16), (7, 300, torch.bfloat16), (9, 8, torch.float32), (2, 9, torch.int8)],
)
def test_paths_copied_out_end_in_their_root(
    count: int, width: int, dtype: torch.dtype, backend: str
) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    sources = [(rows(40, width, torch.float32, i) * 9).to(dtype) for i in range(count)]
    path = [[0, 3, 7, -1], [0, 10**6, -5, 3], [0, 1, 2, 9], [4, 5, 6, 7]]
    length, starts = [3, 1, 4, 0], [2, 11, 20, 30]
    wanted = [
        start + (nodes[i] if i < n else 0)
        for start, nodes, n in zip(starts, path, length, strict=True)
        for i in range(4)
    ]
    index = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, path, length)]
    got = gather_paths([x.to(device) for x in sources], *index, backend=backend)
    assert torch.equal(got.cpu(), torch.stack([x[wanted] for x in sources]))
    short = gather_paths([x.to(device) for x in sources], index[0], index[1][:, :2], index[2])
    assert torch.equal(short[0].cpu(), sources[0][[2, 5, 11, 11, 20, 21, 30, 30]])


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_captured_graph_moves_along_another_path() -> None:
    sources = [rows(128, 5120, torch.bfloat16, i).cuda() for i in range(6)]
    before = [x.clone() for x in sources]
    starts = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    path = torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32, device="cuda")
    length = torch.tensor([3, 3], dtype=torch.int32, device="cuda")
    gather_rows(sources, starts, path, length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_rows(sources, starts, path, length)
    path.copy_(torch.tensor([[0, 5, 9], [0, 60, 63]]))
    length.copy_(torch.tensor([2, 3]))
    graph.replay()
    for got, old in zip(sources, before, strict=True):
        old[1] = old[5].clone()
        old[65:67] = old[[124, 127]]
        assert torch.equal(got, old)


def test_no_value_is_read_back_from_the_device() -> None:
    # Meta tensors have no values: anything that looks at one raises.
    source = torch.empty(8, 8, device="meta")
    starts, path, length = (
        torch.empty(s, dtype=torch.int32, device="meta") for s in ((2,), (2, 3), (2,))
    )
    gather_rows([source], starts, path, length)


def test_bad_input_is_refused_by_name() -> None:
    source = rows(8, 8, torch.float32)
    starts, path, length = (torch.zeros(s, dtype=torch.int32) for s in ((2,), (2, 3), (2,)))
    with pytest.raises(ValueError, match="unknown backend 'cuda'; available: reference, triton"):
        gather_rows([source], starts, path, length, backend="cuda")
    with pytest.raises(ValueError, match=r"starts has shape \[1\], expected \[2\]"):
        gather_rows([source], starts[:1], path, length)
    with pytest.raises(ValueError, match=r"path is torch\.float32"):
        gather_rows([source], starts, path.float(), length)
    with pytest.raises(ValueError, match=r"sources\[1\] has shape \[8, 8\] and strides \[1, 8\]"):
        gather_rows([source, source.t()], starts, path, length)
